"""The n-gram pool of a request: candidates for the tokens after a token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

CONTEXT_LEN = 3
"""Tokens before an n-gram of the text that are kept with it."""


class Candidate(NamedTuple):
    """An n-gram without its first token."""

    tokens: tuple[int, ...]
    num_matched: int
    """Length of the context that the n-gram shares with the text, at most `CONTEXT_LEN`; 0 for
    n-grams of the window."""


class NgramPool:
    """N-grams by their first token, bounded per token and in all.

    Args:
        max_per_token: Limit for one first token; the oldest n-gram is dropped.
        max_ngrams: Limit for all; the oldest n-gram of the first token that has gone longest
            without a new one is dropped.
    """

    def __init__(self, max_per_token: int, max_ngrams: int) -> None:
        self._max_per_token = max_per_token
        self._max_ngrams = max_ngrams
        # By first token the n-grams and the text before each. Both dictionaries are in order of
        # age, the newest entry last.
        self._by_first: OrderedDict[int, dict[tuple[int, ...], tuple[int, ...]]] = OrderedDict()
        self.num_ngrams = 0

    def add(self, first: int, rest: tuple[int, ...], before: tuple[int, ...] = ()) -> None:
        """Add the n-gram `(first, *rest)`; a known one becomes the newest.

        `before` is the text before an n-gram of the text. N-grams of the window have none: the
        tokens before them are guesses, and agreement with those predicts nothing (measured).
        """
        ngrams = self._by_first.setdefault(first, {})
        self._by_first.move_to_end(first)
        same = ngrams.pop(rest, None)
        if same is None:
            self.num_ngrams += 1
            ngrams[rest] = before
        else:
            ngrams[rest] = before or same
        if len(ngrams) > self._max_per_token:
            self._drop_oldest(ngrams)
        elif self.num_ngrams > self._max_ngrams:
            stale, oldest = next(iter(self._by_first.items()))
            self._drop_oldest(oldest)
            if not oldest:
                del self._by_first[stale]

    def add_text(self, token_ids: Sequence[int], ngram_size: int, start: int = 0) -> None:
        """Add the n-grams of a text that begin at `start` or later, the last that fit the pool."""
        end = len(token_ids) - ngram_size + 1
        for first in range(max(start, end - self._max_ngrams), end):
            rest = tuple(token_ids[first + 1 : first + ngram_size])
            before = tuple(token_ids[max(0, first - CONTEXT_LEN) : first])
            self.add(token_ids[first], rest, before)

    def after(self, token_ids: Sequence[int]) -> list[Candidate]:
        """Return the candidates after a text: the longest shared context first, then the newest.

        Only the last `CONTEXT_LEN + 1` tokens of the text are read.
        """
        ngrams = self._by_first.get(token_ids[-1])
        if not ngrams:
            return []
        context = token_ids[:-1]
        candidates = [
            Candidate(rest, _common_suffix(before, context))
            for rest, before in reversed(ngrams.items())
        ]
        candidates.sort(key=lambda candidate: -candidate.num_matched)
        return candidates

    def _drop_oldest(self, ngrams: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        del ngrams[next(iter(ngrams))]
        self.num_ngrams -= 1


def _common_suffix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        length += 1
    return length
