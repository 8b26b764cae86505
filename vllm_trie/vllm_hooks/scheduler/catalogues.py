"""Catalogues in the scheduler, and what it tells the worker about constrained rows.

The scheduler checks a catalogue's file and keeps the place of each row. With every step, the worker
gets the rows' nodes and chooses candidates among their children. It shares the scheduler's copy of
the file, or reads the file on another host if its digest is the one that the scheduler has checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vllm_trie.beam import BeamOptions
from vllm_trie.items import ItemTrie, open_items
from vllm_trie.items.selection import Rules, Selection, select
from vllm_trie.vllm_hooks.wire import packed
from vllm_trie.watched_file import WatchedFile


class Catalogue(NamedTuple):
    """One version of a catalogue."""

    path: Path
    trie: ItemTrie


MAX_SELECTIONS = 64
"""Selections that are kept for equal requests."""


class Catalogues:
    """Owner of the engine's catalogues; takes new versions up while it serves.

    Searches that run keep the version that they began with.
    """

    def __init__(self, paths: Mapping[str, Path], vocab_size: int) -> None:
        def open_catalogue(path: Path) -> Catalogue:
            return Catalogue(path, open_items(path, vocab_size))

        self._files = {
            name: WatchedFile(path, open_catalogue, f"catalogue {name!r}")
            for name, path in paths.items()
        }
        self._selections: OrderedDict[tuple[str, str], Selection] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._files)

    def latest(self, name: str) -> Catalogue:
        """Return the newest checked version of a catalogue.

        Raises:
            ValueError: There is no catalogue of this name.
        """
        if name not in self._files:
            raise ValueError(f"items={name!r} is no catalogue of this engine")
        return self._files[name].latest()

    def select(self, catalogue: Catalogue, options: BeamOptions) -> Selection | None:
        """Return the part of a catalogue that a request may generate, None for all of it."""
        rules = Rules(
            options.allow_items,
            options.allow_prefixes,
            options.deny_items or (),
            options.deny_prefixes or (),
        )
        if not rules.restrict:
            return None
        key = catalogue.trie.version, packed(options)
        selection = self._selections.get(key)
        if selection is None:
            selection = self._selections[key] = select(catalogue.trie, rules)
            if len(self._selections) > MAX_SELECTIONS:
                self._selections.popitem(last=False)
        return selection
