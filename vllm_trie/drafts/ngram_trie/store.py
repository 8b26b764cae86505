"""The outputs of finished requests, to draft from."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from vllm_trie.drafts.ngrams import NativeBackend, NativeIndex
from vllm_trie.drafts.text_store import (
    PROMPT_BYTES,
    StoredText,
    TextStore,
    newest,
    salt_digest,
)

_Key = tuple[bytes, int]
"""Digest of a salt, and a text's number in its index."""
PROMPT_TOKENS = 32
"""A fingerprint covers as many of a prompt's end: a chat template's tail, and more."""
TEXT_TOKENS = 12
"""Tokens that a text counts as in addition, for its own memory and that of its salt's index."""


def prompt_print(cache_salt: str | None, prompt: np.ndarray) -> bytes:
    """Return the hash of a prompt's last tokens and its salt."""
    end = np.ascontiguousarray(prompt[-PROMPT_TOKENS:], dtype="<i4")
    text = salt_digest(cache_salt) + end.tobytes()
    return blake2b(text, digest_size=PROMPT_BYTES).digest()


class RequestStore:
    """The outputs of finished requests, up to a number of tokens, and `TEXT_TOKENS` for each.

    Requests with different cache salts never see one another's text: each salt has its own index
    (requests without a salt share one). The bound is over all salts together; the text that was
    added or matched longest ago goes first, from its end on. Long texts come and go in parts: an
    engine's step waits for each.

    Salts are kept as digests. Of a prompt, its fingerprint is kept,
    so that a request that repeats it finds the answer from the first token.

    Memory: about 200 bytes a token (an n-gram node takes 52 bytes and 8 to 16 of hash table, and
    text has 2 to 3 of them a token).

    Args:
        backend: Makes the indexes.
        max_order: Of the indexes.
        max_tokens: The bound.
        stores: Where the texts are kept for other engines; the texts of earlier ones are indexed
            at once.
    """

    def __init__(
        self,
        backend: NativeBackend,
        max_order: int,
        max_tokens: int,
        stores: Sequence[TextStore] = (),
    ) -> None:
        self._backend = backend
        self._max_order = max_order
        self._max_tokens = max_tokens
        self._indexes: dict[bytes, NativeIndex] = {}
        # By key, least recently used first.
        self._texts: OrderedDict[_Key, StoredText] = OrderedDict()
        self._answers: dict[bytes, _Key] = {}  # prompt -> key of its latest answer
        # Of the texts, and of those that wait: equal ones are counted.
        self._digests: Counter[int] = Counter()
        self._waiting: deque[StoredText] = deque()
        self._num_waiting = 0  # their tokens
        # The text of which a part is indexed, its key and the size of the part; and that of which a
        # part is left.
        self._entering: tuple[StoredText, _Key, int] | None = None
        self._leaving: tuple[_Key, int] | None = None
        self.num_tokens = 0
        self._stores = stores
        for store in stores:
            self.restore(store.restore(self.texts))
        self.take_in(max_tokens)

    def index(self, cache_salt: str | None) -> NativeIndex | None:
        """Return the index that requests with this salt draft from, None if it is empty."""
        return self._indexes.get(salt_digest(cache_salt))

    def add(self, cache_salt: str | None, token_ids: np.ndarray, prompt: bytes = b"") -> None:
        """Let an output wait for :meth:`take_in`; of a text longer than the whole store, keep the
        end.

        Args:
            cache_salt: Of the request.
            token_ids: int32, the output; copied.
            prompt: Fingerprint of the prompt, empty if it is not to be found by it.
        """
        text = StoredText(salt_digest(cache_salt), token_ids[-self._max_tokens :].copy(), prompt)
        self._add(text)
        if len(token_ids):
            for store in self._stores:
                store.add(text)

    def receive(self, max_tokens: int) -> None:
        """Let texts that other engines have published wait, see :meth:`TextStore.receive`."""
        for store in self._stores:
            if texts := store.receive(max_tokens):
                self.restore(texts)

    def take_in(self, max_tokens: int) -> None:
        """Index texts that wait, of the last one a part, and remove the oldest that no longer fit;
        `max_tokens` of either at most."""
        while max_tokens > 0 and (self._entering or self._waiting):
            if self._entering is None:
                text, number, size = self._waiting.popleft(), None, 0
                self._num_waiting -= len(text.token_ids)
            else:
                text, (_, number), size = self._entering
            part = text.token_ids[size : size + max_tokens]
            cost = len(part) + (TEXT_TOKENS if size == 0 else 0)
            self._make_room(cost)
            index = self._indexes.get(text.salt)
            if index is None:
                index = self._indexes[text.salt] = self._backend.new_index(self._max_order)
            key = text.salt, index.add_text(part, number)
            self.num_tokens += len(part)
            max_tokens -= cost
            size += len(part)
            self._entering = text, key, size
            if size == len(text.token_ids):
                self._entering = None
                self._texts[key] = text
                if text.prompt:
                    self._answers[text.prompt] = key

    def listen(self, cache_salt: str | None) -> None:
        """Receive what other engines publish for a salt."""
        for store in self._stores:
            store.listen(salt_digest(cache_salt))

    def answer(self, cache_salt: str | None, prompt: bytes) -> int:
        """Return the number of the latest answer to a prompt in the salt's index, -1 if none."""
        salt, number = self._answers.get(prompt, (b"", -1))
        return number if salt == salt_digest(cache_salt) else -1

    def mark_used(self, cache_salt: str | None, text: int) -> None:
        """Make this text the most recently used; texts that are gone are ignored."""
        key = (salt_digest(cache_salt), text)
        if key in self._texts:
            self._texts.move_to_end(key)

    def texts(self) -> list[StoredText]:
        """Return all texts, least recently used first; their arrays never change."""
        entering = [] if self._entering is None else [self._entering[0]]
        return [*self._texts.values(), *entering, *self._waiting]  # an engine's step waits for it

    def restore(self, texts: Sequence[StoredText]) -> None:
        """Let texts of other engines wait, least recently used first; those that fit.

        Those that the store has are left out: several stores may hold the same.
        """
        fitting = newest(texts, self._max_tokens)
        for text in [text for text in fitting if _digest(text) not in self._digests]:
            self._add(text)

    def clear(self) -> None:
        """Forget all texts, also those that other engines have published."""
        for container in (self._indexes, self._texts, self._answers, self._digests, self._waiting):
            container.clear()
        self._entering = self._leaving = None
        self.num_tokens = self._num_waiting = 0
        for store in self._stores:
            store.forget()

    def _add(self, text: StoredText) -> None:
        if len(text.token_ids) == 0:
            return
        self._waiting.append(text)
        self._digests[_digest(text)] += 1
        self._num_waiting += len(text.token_ids)
        while len(self._waiting) > 1 and (  # nobody drafts, so nobody takes them in
            self._num_waiting + TEXT_TOKENS * len(self._waiting) > self._max_tokens
        ):
            oldest = self._waiting.popleft()
            self._forget_digest(oldest)
            self._num_waiting -= len(oldest.token_ids)

    @property
    def _size(self) -> int:
        """Tokens that are indexed, and those that their texts count as."""
        parts = (self._entering is not None) + (self._leaving is not None)
        return self.num_tokens + TEXT_TOKENS * (len(self._texts) + parts)

    def _make_room(self, cost: int) -> None:
        """Remove the ends of the oldest texts until so much fits, or all of them."""
        while (excess := self._size + cost - self._max_tokens) > 0 and (
            self._texts or self._leaving
        ):
            if self._leaving is None:
                key, text = self._texts.popitem(last=False)
                self._forget_digest(text)
                if self._answers.get(text.prompt) == key:
                    del self._answers[text.prompt]
                self._leaving = key, len(text.token_ids)
            key, size = self._leaving
            removed = min(size, excess)
            index = self._indexes[key[0]]
            index.remove_text(key[1], removed)
            self.num_tokens -= removed
            self._leaving = (key, size - removed) if removed < size else None
            if index.num_tokens == 0:
                del self._indexes[key[0]]

    def _forget_digest(self, text: StoredText) -> None:
        digest = _digest(text)
        self._digests[digest] -= 1
        if not self._digests[digest]:
            del self._digests[digest]


def _digest(text: StoredText) -> int:
    return hash((text.salt, text.prompt, text.token_ids.tobytes()))
