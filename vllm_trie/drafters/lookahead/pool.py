"""The n-gram pool of a request: what may follow a token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

CONTEXT_LEN = 3
"""Tokens before an n-gram of the text that are kept with it."""


class Candidate(NamedTuple):
    """What may follow a token."""

    tokens: tuple[int, ...]
    num_matched: int
    """How many tokens before the n-gram were the same where it stood in the text, at most
    `CONTEXT_LEN`; 0 for n-grams of the window."""
    age: int = 0
    """Steps since it was taken in last."""
    is_repeated: bool = False
    """Whether it was taken in more than once."""


_Known = tuple[tuple[int, ...], int, bool]
"""What the pool knows of an n-gram: the text before it, the step when it was taken in last, and
whether it was taken in more than once. Plain, because there are ten new ones at each step."""


class NgramPool:
    """N-grams by their first token, bounded per token and in all.

    Args:
        max_per_token: most n-grams kept for one first token; the oldest goes first.
        max_ngrams: most n-grams kept at all; one of the first token that was longest without a new
            n-gram goes first.
    """

    def __init__(self, max_per_token: int, max_ngrams: int) -> None:
        self._max_per_token = max_per_token
        self._max_ngrams = max_ngrams
        # Both dictionaries are in order of age, the newest entry last.
        self._by_first: OrderedDict[int, dict[tuple[int, ...], _Known]] = OrderedDict()
        self._step = 0
        self.num_ngrams = 0

    def begin_step(self) -> None:
        """What is taken in from now on is a step younger."""
        self._step += 1

    def add(self, first: int, rest: tuple[int, ...], before: tuple[int, ...] = ()) -> None:
        """Take in the n-gram `(first, *rest)`; a known one becomes the newest.

        `before` is the text before it. What stands before an n-gram of the window is a guess and
        says nothing (measured: its n-grams fit no better where it agrees), so leave it out there.
        """
        known = self._by_first.setdefault(first, {})
        self._by_first.move_to_end(first)
        same = known.pop(rest, None)
        if same is None:
            self.num_ngrams += 1
            known[rest] = (before, self._step, False)
        else:
            known[rest] = (before or same[0], self._step, True)
        if len(known) > self._max_per_token:
            self._drop_oldest(known)
        elif self.num_ngrams > self._max_ngrams:
            stale, oldest = next(iter(self._by_first.items()))
            self._drop_oldest(oldest)
            if not oldest:
                del self._by_first[stale]

    def add_text(self, token_ids: Sequence[int], ngram_size: int, start: int = 0) -> None:
        """Take in every n-gram of a text that begins at `start` or later, as many of the last as
        the pool holds."""
        end = len(token_ids) - ngram_size + 1
        for first in range(max(start, end - self._max_ngrams), end):
            rest = tuple(token_ids[first + 1 : first + ngram_size])
            before = tuple(token_ids[max(0, first - CONTEXT_LEN) : first])
            self.add(token_ids[first], rest, before)

    def after(self, token_ids: Sequence[int]) -> list[Candidate]:
        """What may follow a text: those with the longest common context first, then the newest.

        Only the last `CONTEXT_LEN + 1` tokens of the text are read.
        """
        known = self._by_first.get(token_ids[-1])
        if not known:
            return []
        context = token_ids[:-1]
        candidates = [
            Candidate(rest, _common_suffix(before, context), self._step - step, is_repeated)
            for rest, (before, step, is_repeated) in reversed(known.items())
        ]
        candidates.sort(key=lambda candidate: -candidate.num_matched)
        return candidates

    def _drop_oldest(self, known: dict[tuple[int, ...], _Known]) -> None:
        del known[next(iter(known))]
        self.num_ngrams -= 1


def _common_suffix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(reversed(left), reversed(right), strict=False):
        if a != b:
            break
        length += 1
    return length
