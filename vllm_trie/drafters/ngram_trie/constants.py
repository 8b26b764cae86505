"""Constants of the blended scoring."""

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


PATH_TRUST = 0.4
"""How much likelier than the blend says a guess is whose parent was accepted: that the text is
being repeated is then more certain. Odds of small probabilities grow by this part."""


class Source(NamedTuple):
    """How far the counts of a source are believed: the parameters of a Pitman-Yor process."""

    concentration: float
    """theta: pseudo-observations of "something else", at least 0."""
    discount: float
    """d: taken off each successor's count, in [0, 1)."""


# The same for contexts of all lengths: docs/ngram_trie.md tells what more parameters bring.
OWN = Source(concentration=0.5, discount=0.7)
"""The request's own text."""
SHARED = Source(concentration=4.0, discount=0.8)
"""Finished requests and the corpus."""
