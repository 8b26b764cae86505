"""A read-only index to draft from, which an extra may open."""

from __future__ import annotations

from collections.abc import Callable

from vllm_trie.drafts.drafter import DrafterContext, DrafterOptions
from vllm_trie.drafts.ngrams.native import NativeArchive


class ArchiveOptions(DrafterOptions):
    """Options of an archive; these are those of none."""

    def check_archive(self, vocab_size: int) -> None:
        """Check the archive in the front end, see :meth:`Drafter.check_files`.

        Raises:
            RefusedError: It cannot be used.
        """

    def open_archive(self, context: DrafterContext) -> Callable[[], NativeArchive | None]:
        """Return a function that gives the newest version of the archive.

        Raises:
            RefusedError: It cannot be used with this engine's model.
        """
        return lambda: None
