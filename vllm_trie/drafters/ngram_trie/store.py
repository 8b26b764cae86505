"""The outputs of finished requests, to draft from."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from vllm_trie.ngrams import Backend, Index


class RequestStore:
    """The outputs of finished requests, up to a number of tokens.

    Requests with different cache salts never see one another's text: each salt has its own index
    (requests without a salt share one). The bound is over all salts together; the text that was
    added or matched longest ago goes first.

    Memory: about 200 bytes a token (an n-gram node takes 52 bytes and 8 to 16 of hash table, and
    text has 2 to 3 of them a token).
    """

    def __init__(self, backend: Backend, max_order: int, max_tokens: int) -> None:
        self._backend = backend
        self._max_order = max_order
        self._max_tokens = max_tokens
        self._indexes: dict[str | None, Index] = {}
        # (salt, text) -> number of tokens, least recently used first.
        self._sizes: OrderedDict[tuple[str | None, int], int] = OrderedDict()
        self.num_tokens = 0

    @property
    def num_texts(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return sum(index.num_bytes for index in self._indexes.values())

    def index(self, cache_salt: str | None) -> Index | None:
        """Return the index that requests with this salt draft from, None if it is empty."""
        return self._indexes.get(cache_salt)

    def add(self, cache_salt: str | None, token_ids: np.ndarray) -> None:
        """Add an output, and remove the oldest that no longer fit; of a text longer than the whole
        store, keep the end."""
        token_ids = token_ids[-self._max_tokens :]
        if len(token_ids) == 0:
            return
        while self.num_tokens + len(token_ids) > self._max_tokens:
            self._remove_oldest()
        index = self._indexes.get(cache_salt)
        if index is None:
            index = self._indexes[cache_salt] = self._backend.new_index(self._max_order)
        self._sizes[cache_salt, index.add_text(token_ids)] = len(token_ids)
        self.num_tokens += len(token_ids)

    def mark_used(self, cache_salt: str | None, text: int) -> None:
        """Make this text the most recently used; texts that are gone are ignored."""
        if (cache_salt, text) in self._sizes:
            self._sizes.move_to_end((cache_salt, text))

    def _remove_oldest(self) -> None:
        (cache_salt, text), size = self._sizes.popitem(last=False)
        self.num_tokens -= size
        index = self._indexes[cache_salt]
        index.remove_text(text)
        if index.num_tokens == 0:
            del self._indexes[cache_salt]
