"""Sources of drafts beside a method's drafter."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafts.drafter import DraftRequest
from vllm_trie.tree import TokenTree


class DraftSource:
    """Adds drafts to those of an engine's drafter, whichever that is."""

    def may_extend(self, request: DraftRequest) -> bool:
        """Return whether it may change a request's tree. Drafts that are prepared reach the device
        before :meth:`extend`, so such a request has none prepared."""
        return True

    def extend(self, requests: Sequence[DraftRequest], trees: list[TokenTree]) -> list[TokenTree]:
        """Return the drafter's trees with the source's drafts.

        Args:
            requests: As the drafter got them; not modified.
            trees: Of each request, unchecked and not modified: the drafter may keep them.
        """
        return trees
