"""How often candidates are right, counted while decoding."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafters.lookahead.pool import CONTEXT_LEN, Candidate

# What is expected before anything is counted: seen on the shipped model with the prompts that were
# written by hand (docs/lookahead.md). A candidate's first token, by its rank, where it shares the
# whole context with the text before it, ...
_FULL_CONTEXT = (0.89, 0.5, 0.1)
_PART_OF_CONTEXT = (0.65, 0.3, 0.1)
"""... a part of it, as long as the best one's, ..."""
_NO_CONTEXT = (0.36, 0.14, 0.06, 0.06, 0.03)
"""... or nothing at all."""
# First tokens with a shorter common context than the best one's, by the length of the best one's.
_BESIDE_LONGER_CONTEXT = (0.0, 0.1, 0.03, 0.012)
# Next tokens by the length of the common context and the number of right tokens before them.
_CONTINUED = ((0.68, 0.68, 0.83), (0.76, 0.82, 0.94), (0.72, 0.85, 0.88), (0.93, 0.94, 0.95))
_BESIDE_CONTINUED = (0.09, 0.2, 0.25, 0.4)
"""Next tokens that differ from a better candidate's, by the length of the common context; halved
for each further one."""

# How much likelier or less likely than its class a token is, as factors of its odds: by the age of
# its n-gram (found in this step, in the two before, earlier), ...
_AGES = (0, 2)
_OF_AGE = (1.6, 1.2, 0.8)
_OF_REPEATED = 1.7
"""... if its n-gram was found more than once, ..."""
_OF_WINDOW = (0.75, 1.2, 1.7)
"""... and by how often the window has it (never, once, more often)."""

_MOST_RANKS = 5
_MOST_RIGHT = 3
# Chosen by replay on the same prompts; half and twice as much made little difference.
_PRIOR_WEIGHT = 20.0
"""Tokens that the expected rate of a class counts for, and that of a subclass."""
_MEMORY = 1000.0
"""Tokens that a class remembers; where it has more, all of them count half."""

_OF_NGRAM = 2 * len(_OF_AGE)
_ODDS = [
    of_window * of_age * of_repeated
    for of_window in _OF_WINDOW
    for of_age in _OF_AGE
    for of_repeated in (1.0, _OF_REPEATED)
]
NUM_SUBCLASSES = len(_ODDS)


def subclass_of_ngram(candidate: Candidate) -> int:
    """What is known of the n-gram itself: how long ago it was found, and whether more than once."""
    age = sum(candidate.age > most for most in _AGES)
    return 2 * age + candidate.is_repeated


def subclass_of_token(of_ngram: int, num_in_window: int) -> int:
    """What is known of a token: the same of its n-gram, and how often the window has it.

    The window holds what the model guesses of the text to come. Even a guess at another position
    makes a token likelier: of first tokens without common context, 20 % were right that the window
    did not have, and 49 % of those that it had twice.
    """
    return of_ngram + _OF_NGRAM * min(num_in_window, len(_OF_WINDOW) - 1)


class Rate:
    """How often the tokens of a class were right.

    A class begins with the rate that is expected of it, and a subclass with that of its class and
    the odds that are expected of it there. So both say something from the first token on, and tell
    what was seen in the end.
    """

    __slots__ = ("_expected", "_right", "_right_in", "_seen", "_seen_in")

    def __init__(self, expected: float) -> None:
        self._expected = _PRIOR_WEIGHT * expected
        self._seen = 0.0
        self._right = 0.0
        self._seen_in = [0.0] * NUM_SUBCLASSES
        self._right_in = [0.0] * NUM_SUBCLASSES

    def probability(self, sub: int) -> float:
        """Probability that a token of this subclass is right, if those before it are."""
        of_class = (self._right + self._expected) / (self._seen + _PRIOR_WEIGHT)
        odds = of_class * _ODDS[sub]
        expected = odds / (1.0 - of_class + odds)
        return (self._right_in[sub] + _PRIOR_WEIGHT * expected) / (
            self._seen_in[sub] + _PRIOR_WEIGHT
        )

    def count(self, sub: int, was_right: bool) -> None:
        """Take in a token whose predecessors were right."""
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

    A class is what the pool says of a candidate beside the others: its rank, the length of the
    context that it shares with the text, and how many of its tokens were right before. Plain
    arithmetic in the order of the calls, so equal on every rank, and of fixed size.
    """

    def __init__(self) -> None:
        lengths = range(CONTEXT_LEN + 1)
        ranks = range(_MOST_RANKS)
        self._first = [
            [[Rate(_expected_first(rank, own, best)) for rank in ranks] for own in lengths]
            for best in lengths
        ]
        self._next = [
            [[Rate(_expected_next(rank, own, right)) for rank in ranks] for own in lengths]
            for right in range(1, _MOST_RIGHT + 1)
        ]

    def of_first_token(self, rank: int, num_matched: int, best_matched: int) -> Rate:
        """Of a candidate's first token.

        Args:
            rank: number of other first tokens that better candidates have.
            num_matched: length of the context that the candidate shares with the text.
            best_matched: that of the best candidate.
        """
        return self._first[best_matched][num_matched][min(rank, _MOST_RANKS - 1)]

    def of_next_token(self, rank: int, num_matched: int, num_right: int) -> Rate:
        """Of a candidate's token after `num_right` right ones, at least one; `rank` counts the
        other tokens that better candidates have there."""
        return self._next[min(num_right, _MOST_RIGHT) - 1][num_matched][min(rank, _MOST_RANKS - 1)]


def _expected_first(rank: int, num_matched: int, best_matched: int) -> float:
    if num_matched < best_matched:
        return _BESIDE_LONGER_CONTEXT[best_matched]
    if num_matched == CONTEXT_LEN:
        return _at(_FULL_CONTEXT, rank)
    return _at(_PART_OF_CONTEXT if num_matched else _NO_CONTEXT, rank)


def _expected_next(rank: int, num_matched: int, num_right: int) -> float:
    if rank == 0:
        return _at(_CONTINUED[num_matched], num_right - 1)
    return _BESIDE_CONTINUED[num_matched] * 0.5 ** (rank - 1)


def _at(values: Sequence[float], index: int) -> float:
    """A value, the last one beyond the end."""
    return values[min(index, len(values) - 1)]
