"""Constants of the blended scoring, by context length."""

from __future__ import annotations

from typing import NamedTuple

MAX_ORDER = 8
"""Longest context that is looked up, in tokens."""

MAX_SUCCESSORS = 32
"""Successors of a context that are kept in order, and read by a draft."""

MIN_LEFT = 1e-4
"""A blend ends when no more probability than this is left to give."""

CUT_LEFT = 0.5
CUT_SHARE = 0.25
"""Once a tree has enough guesses, a successor must have some probability to be chosen. A blend ends
when less than the first part of that is left, and leaves out shares below the second."""

USE_LENGTH = 3
"""A match of this many tokens counts as a use of the stored text that it was found in."""


class Source(NamedTuple):
    """How far the counts of one source are believed (Pitman-Yor parameters by context length)."""

    concentration: tuple[float, ...]
    """theta: pseudo-observations of "something else", at least 0."""
    discount: tuple[float, ...]
    """d: taken off each successor's count, in [0, 1)."""


# Index 0 is the empty context, the last entry holds for all longer ones too. Chosen on a plateau:
# see docs/ngram_trie.md for how little each matters.
OWN = Source((1.0, 0.8, 1.0, 0.8, 0.8, 0.5, 0.4), (0.8, 0.73, 0.5, 0.7, 0.7, 0.6, 0.6))
SHARED = Source((5.0, 4.0, 4.0, 5.0, 4.0), (0.8, 0.8, 0.8, 0.85, 0.75))


def at_order(values: tuple[float, ...], order: int) -> float:
    """The constant for contexts of `order` tokens."""
    return values[min(order, len(values) - 1)]
