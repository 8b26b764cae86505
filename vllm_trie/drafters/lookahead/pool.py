"""The n-gram pool of a request: what may follow a token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

Continuation = tuple[int, ...]


class NgramPool:
    """N-grams by their first token, the newest first; bounded per token and in all.

    Args:
        max_per_token: most continuations kept for one first token; the oldest goes first.
        max_ngrams: most continuations kept at all; one of the first token that was longest without
            a new n-gram goes first.
    """

    def __init__(self, max_per_token: int, max_ngrams: int) -> None:
        self._max_per_token = max_per_token
        self._max_ngrams = max_ngrams
        # Both dictionaries are in order of age, the newest entry last.
        self._by_first: OrderedDict[int, dict[Continuation, None]] = OrderedDict()
        self.num_ngrams = 0

    def add(self, first: int, rest: Continuation) -> None:
        """Take in the n-gram `(first, *rest)`; a known one becomes the newest."""
        known = self._by_first.setdefault(first, {})
        self._by_first.move_to_end(first)
        if rest in known:
            del known[rest]
        else:
            self.num_ngrams += 1
        known[rest] = None
        if len(known) > self._max_per_token:
            self._drop_oldest(known)
        elif self.num_ngrams > self._max_ngrams:
            stale, oldest = next(iter(self._by_first.items()))
            self._drop_oldest(oldest)
            if not oldest:
                del self._by_first[stale]

    def add_text(self, token_ids: Sequence[int], ngram_size: int) -> None:
        """Take in every n-gram of a text, as many of the last as fit."""
        first = max(0, len(token_ids) - ngram_size + 1 - self._max_ngrams)
        for start in range(first, len(token_ids) - ngram_size + 1):
            ngram = token_ids[start : start + ngram_size]
            self.add(ngram[0], tuple(ngram[1:]))

    def after(self, first: int) -> list[Continuation]:
        """Continuations of a token, the newest first."""
        return list(reversed(self._by_first.get(first, {})))

    def _drop_oldest(self, known: dict[Continuation, None]) -> None:
        del known[next(iter(known))]
        self.num_ngrams -= 1
