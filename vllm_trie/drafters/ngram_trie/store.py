"""The outputs of finished requests, to draft from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from vllm_trie.ngrams import Backend, Index
from vllm_trie.store import StoredText, newest, salt_digest


class RequestStore:
    """The outputs of finished requests, up to a number of tokens.

    Requests with different cache salts never see one another's text: each salt has its own index
    (requests without a salt share one). The bound is over all salts together; the text that was
    added or matched longest ago goes first.

    Salts are kept as digests, as in the file of a warm start.

    Memory: about 200 bytes a token (an n-gram node takes 52 bytes and 8 to 16 of hash table, and
    text has 2 to 3 of them a token).
    """

    def __init__(self, backend: Backend, max_order: int, max_tokens: int) -> None:
        self._backend = backend
        self._max_order = max_order
        self._max_tokens = max_tokens
        self._indexes: dict[bytes, Index] = {}
        # (digest of the salt, number in its index) -> text, least recently used first.
        self._texts: OrderedDict[tuple[bytes, int], StoredText] = OrderedDict()
        self.num_tokens = 0

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        return sum(index.num_bytes for index in self._indexes.values())

    def index(self, cache_salt: str | None) -> Index | None:
        """Return the index that requests with this salt draft from, None if it is empty."""
        return self._indexes.get(salt_digest(cache_salt))

    def add(self, cache_salt: str | None, token_ids: np.ndarray) -> None:
        """Add an output, and remove the oldest that no longer fit; of a text longer than the whole
        store, keep the end."""
        self._add(StoredText(salt_digest(cache_salt), token_ids[-self._max_tokens :]))

    def mark_used(self, cache_salt: str | None, text: int) -> None:
        """Make this text the most recently used; texts that are gone are ignored."""
        key = (salt_digest(cache_salt), text)
        if key in self._texts:
            self._texts.move_to_end(key)

    def texts(self) -> list[StoredText]:
        """Return all texts, least recently used first; their arrays never change."""
        return list(self._texts.values())  # an engine's step waits for it

    def restore(self, texts: Sequence[StoredText]) -> None:
        """Add texts of an earlier engine, least recently used first; those that fit."""
        for text in newest(texts, self._max_tokens):
            self._add(text)

    def _add(self, text: StoredText) -> None:
        salt, token_ids = text
        if len(token_ids) == 0:
            return
        while self.num_tokens + len(token_ids) > self._max_tokens:
            self._remove_oldest()
        index = self._indexes.get(salt)
        if index is None:
            index = self._indexes[salt] = self._backend.new_index(self._max_order)
        self._texts[salt, index.add_text(token_ids)] = text
        self.num_tokens += len(token_ids)

    def _remove_oldest(self) -> None:
        (salt, number), text = self._texts.popitem(last=False)
        self.num_tokens -= len(text.token_ids)
        index = self._indexes[salt]
        index.remove_text(number)
        if index.num_tokens == 0:
            del self._indexes[salt]
