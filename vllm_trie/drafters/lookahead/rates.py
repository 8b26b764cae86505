"""Acceptance rates of candidates, learned while decoding."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafters.lookahead.pool import CONTEXT_LEN

# Initial rates, fitted on the shipped model with the hand-written prompts (docs/lab_drafters.md).
# Of a candidate's first token by its rank, where the candidate shares the whole context with the
# text, as long a part of it as the best candidate, or nothing:
_FULL_CONTEXT = (0.89, 0.5, 0.1)
_PART_OF_CONTEXT = (0.65, 0.3, 0.1)
_NO_CONTEXT = (0.36, 0.14, 0.06, 0.06, 0.03)
# Where it shares less context than the best candidate, by the length of the best one's:
_LESS_CONTEXT = (0.0, 0.1, 0.03, 0.012)
# Of a next token, by the length of the shared context and the number of right tokens before:
_CONTINUED = ((0.68, 0.68, 0.83), (0.76, 0.82, 0.94), (0.72, 0.85, 0.88), (0.93, 0.94, 0.95))
# Of a next token that differs from a better candidate's; each further one is half as likely:
_BRANCHED = (0.09, 0.2, 0.25, 0.4)

_MAX_RANKS = 5
_MAX_RIGHT = 3
# Chosen by replay on the same prompts; half and twice as much made little difference.
_PRIOR_WEIGHT = 20.0
"""Tokens that the initial rate of a class counts for."""
_MEMORY = 1000.0
"""Tokens that a class remembers; beyond them, all of its tokens count half."""


class Rate:
    """The acceptance rate of a class of tokens: counts replace its initial rate."""

    __slots__ = ("_right", "_seen")

    def __init__(self, expected: float) -> None:
        self._seen = _PRIOR_WEIGHT
        self._right = _PRIOR_WEIGHT * expected

    @property
    def probability(self) -> float:
        """The probability that a token of this class is right if those before it are."""
        return self._right / self._seen

    def count(self, was_right: bool) -> None:
        """Count a token whose predecessors were right."""
        self._seen += 1.0
        self._right += was_right
        if self._seen > _MEMORY:
            self._seen *= 0.5
            self._right *= 0.5


class Rates:
    """The rates of all classes of candidates, shared by the requests of an engine.

    A class is the rank of a candidate, the length of the context that it shares with the text, and
    the number of right tokens before. Plain arithmetic in the order of the calls, so equal on every
    rank, and of fixed size.
    """

    def __init__(self) -> None:
        lengths = range(CONTEXT_LEN + 1)
        ranks = range(_MAX_RANKS)
        self._first = [
            [[Rate(_expected_first(rank, matched, best)) for rank in ranks] for matched in lengths]
            for best in lengths
        ]
        self._next = [
            [[Rate(_expected_next(rank, matched, right)) for rank in ranks] for matched in lengths]
            for right in range(1, _MAX_RIGHT + 1)
        ]

    def of_first_token(self, rank: int, num_matched: int, best_matched: int) -> Rate:
        """Return the rate of a candidate's first token.

        Args:
            rank: Number of other first tokens that better candidates have.
            num_matched: Length of the context that the candidate shares with the text.
            best_matched: That of the best candidate.
        """
        return self._first[best_matched][num_matched][min(rank, _MAX_RANKS - 1)]

    def of_next_token(self, rank: int, num_matched: int, num_right: int) -> Rate:
        """Return the rate of a token after `num_right` right ones, at least one; `rank` counts the
        other tokens that better candidates have there."""
        return self._next[min(num_right, _MAX_RIGHT) - 1][num_matched][min(rank, _MAX_RANKS - 1)]


def _expected_first(rank: int, num_matched: int, best_matched: int) -> float:
    if num_matched < best_matched:
        return _LESS_CONTEXT[best_matched]
    if num_matched == CONTEXT_LEN:
        return _at(_FULL_CONTEXT, rank)
    return _at(_PART_OF_CONTEXT if num_matched else _NO_CONTEXT, rank)


def _expected_next(rank: int, num_matched: int, num_right: int) -> float:
    if rank == 0:
        return _at(_CONTINUED[num_matched], num_right - 1)
    return _BRANCHED[num_matched] * 0.5 ** (rank - 1)


def _at(values: Sequence[float], index: int) -> float:
    return values[min(index, len(values) - 1)]
