"""Acceptance rates of candidates, learned while decoding."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafters.lookahead.pool import CONTEXT_LEN, Candidate

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

# Initial odds of a subclass relative to its class: by the age of the n-gram in steps, by whether it
# was found more than once, and by how often the window has the token (never, once, more often).
_AGE_LIMITS = (0, 2)
_AGE_ODDS = (1.6, 1.2, 0.8)
_REPEATED_ODDS = (1.0, 1.7)
_WINDOW_ODDS = (0.75, 1.2, 1.7)

_MAX_RANKS = 5
_MAX_RIGHT = 3
# Chosen by replay on the same prompts; half and twice as much made little difference.
_PRIOR_WEIGHT = 20.0
"""Tokens that the initial rate of a class or subclass counts for."""
_MEMORY = 1000.0
"""Tokens that a class remembers; beyond them, all of its tokens count half."""

_SUBCLASS_ODDS = [
    window * age * repeated
    for window in _WINDOW_ODDS
    for age in _AGE_ODDS
    for repeated in _REPEATED_ODDS
]
NUM_SUBCLASSES = len(_SUBCLASS_ODDS)


def subclass_of_ngram(candidate: Candidate) -> int:
    """Return the subclass by the age and repetition of an n-gram."""
    age = sum(candidate.age > limit for limit in _AGE_LIMITS)
    return 2 * age + candidate.is_repeated


def subclass_of_token(of_ngram: int, num_in_window: int) -> int:
    """Return the subclass of a token by that of its n-gram and the token's count in the window.

    The window holds the model's guesses of the text to come, and even a guess at another position
    makes a token likelier: of first tokens without shared context, 20 % were right that the window
    did not have, and 49 % of those that it had twice.
    """
    return of_ngram + 2 * len(_AGE_ODDS) * min(num_in_window, len(_WINDOW_ODDS) - 1)


class Rate:
    """The acceptance rate of a class of tokens, and of each subclass.

    A class starts from its initial rate; a subclass starts from the rate of its class and its
    initial odds. Counts replace both.
    """

    __slots__ = ("_expected", "_right", "_right_in", "_seen", "_seen_in")

    def __init__(self, expected: float) -> None:
        self._expected = _PRIOR_WEIGHT * expected
        self._seen = 0.0
        self._right = 0.0
        self._seen_in = [0.0] * NUM_SUBCLASSES
        self._right_in = [0.0] * NUM_SUBCLASSES

    def probability(self, sub: int) -> float:
        """Return the probability that a token of this subclass is right if those before it are."""
        of_class = (self._right + self._expected) / (self._seen + _PRIOR_WEIGHT)
        odds = of_class * _SUBCLASS_ODDS[sub]
        expected = odds / (1.0 - of_class + odds)
        return (self._right_in[sub] + _PRIOR_WEIGHT * expected) / (
            self._seen_in[sub] + _PRIOR_WEIGHT
        )

    def count(self, sub: int, was_right: bool) -> None:
        """Count a token whose predecessors were right."""
        self._seen += 1.0
        self._seen_in[sub] += 1.0
        if was_right:
            self._right += 1.0
            self._right_in[sub] += 1.0
        if self._seen > _MEMORY:
            self._seen *= 0.5
            self._right *= 0.5
            self._seen_in = [seen * 0.5 for seen in self._seen_in]
            self._right_in = [right * 0.5 for right in self._right_in]


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
            rank: number of other first tokens that better candidates have.
            num_matched: length of the context that the candidate shares with the text.
            best_matched: that of the best candidate.
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
