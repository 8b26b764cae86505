"""Acceptance rates of candidates, learned while decoding."""

from __future__ import annotations

from collections.abc import Sequence

# Initial rates, fitted on the shipped model with the hand-written prompts (docs/lab_drafters.md).
# Of a candidate's first token by its rank, by the length of the context that it shares with the
# text:
_FIRST = ((0.36, 0.14, 0.06, 0.06, 0.03), (0.65, 0.3, 0.1), (0.65, 0.3, 0.1), (0.89, 0.5, 0.1))
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

    Plain arithmetic in the order of the calls, so equal on every rank, and of fixed size.
    """

    def __init__(self) -> None:
        self._rates: dict[tuple[int, int, int, int], Rate] = {}

    def of(self, rank: int, num_matched: int, num_right: int, best_matched: int) -> Rate:
        """Return the rate of a class of tokens.

        Args:
            rank: Number of other tokens that better candidates have there.
            num_matched: Length of the context that the candidate shares with the text.
            num_right: Right tokens before.
            best_matched: Length of the context that the best candidate shares, which tells only of
                first tokens.
        """
        best_matched = 0 if num_right else best_matched
        key = min(rank, _MAX_RANKS - 1), num_matched, min(num_right, _MAX_RIGHT), best_matched
        if key not in self._rates:
            self._rates[key] = Rate(_expected(*key))
        return self._rates[key]


def _expected(rank: int, num_matched: int, num_right: int, best_matched: int) -> float:
    if num_matched < best_matched:
        return _LESS_CONTEXT[best_matched]
    if not num_right:
        return _at(_FIRST[num_matched], rank)
    if not rank:
        return _at(_CONTINUED[num_matched], num_right - 1)
    return _BRANCHED[num_matched] * 0.5 ** (rank - 1)


def _at(values: Sequence[float], index: int) -> float:
    return values[min(index, len(values) - 1)]
