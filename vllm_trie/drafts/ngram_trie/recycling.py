"""What the model held likely in earlier steps, kept to draft from."""

from __future__ import annotations

from collections import OrderedDict

from vllm_trie.drafts.ngrams.native import NativeRecycled
from vllm_trie.drafts.text_store import salt_digest

MIN_SCOPES, MAX_SCOPES = 1024, 1 << 16


class Recycling:
    """The table of recycled rows of logits, and the scopes of its contexts.

    Each cache salt is a scope of the table, so a request draws on what requests with the same salt
    made the model compute, and on nothing else. Of many salts, the one used longest ago is
    forgotten.

    Args:
        max_contexts: Room of the table.
        max_num_seqs: The largest batch; it may have as many salts.
    """

    def __init__(self, max_contexts: int, max_num_seqs: int) -> None:
        self._max_scopes = min(max(MIN_SCOPES, max_num_seqs), MAX_SCOPES)
        self.table = NativeRecycled(max(max_contexts, self._max_scopes), self._max_scopes)
        self._scopes: OrderedDict[bytes, int] = OrderedDict()  # by the salt's digest

    def clear(self) -> None:
        """Forget everything."""
        for scope in self._scopes.values():
            self.table.forget(scope)

    def scope(self, cache_salt: str | None) -> int:
        """Return the scope of a salt, which stays its own while the batch is drafted for."""
        salt = salt_digest(cache_salt)
        scope = self._scopes.get(salt)
        if scope is None:
            scope = len(self._scopes)
            if scope == self._max_scopes:
                _, scope = self._scopes.popitem(last=False)
                self.table.forget(scope)
            self._scopes[salt] = scope
        self._scopes.move_to_end(salt)
        return scope
