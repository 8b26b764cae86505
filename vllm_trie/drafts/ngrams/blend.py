"""Parameters of blended back-off; see `core/draft.cpp`."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """Trust in the counts of a source: the parameters of a Pitman-Yor process."""

    concentration: float
    """theta: pseudo-observations of "something else", at least 0."""
    discount: float
    """d: taken off each successor's count, in [0, 1)."""


class Recycled(NamedTuple):
    """Trust in what the model held likely: a token gets this part of its probability."""

    triple: float = 0.4
    """After the last three tokens, in answers to the same prompt; asked before a text's contexts of
    four."""
    pair: float = 0.6
    """After the last two tokens; asked after it."""
    single: float = 0.7
    """After the last one; asked before contexts of one."""
    sibling: float = 0.7
    """After rejected siblings of the last token, in the last step; asked before the empty context,
    as what follows."""
    guess: float = 0.8
    """Trust in a token that was likely in place of the last one: it may follow."""
    odds: float = 0.85
    """Factor of a node's odds: the likeliest of many guesses are overestimated."""


class Blend(NamedTuple):
    """Parameters of a blend."""

    own: Source
    """The request's own text."""
    shared: Source
    """Finished requests."""
    shared_long: Source
    """Their contexts of `long_order` tokens and more, and the answer to such a prompt: a text that
    repeats one of them at length goes on repeating it."""
    archive: Source = Source(concentration=2.0, discount=0.75)
    """An archive; the concentration is for each token of the context."""
    archive_long: Source = Source(concentration=0.2, discount=0.15)
    """Its contexts of `long_order` tokens and more."""
    recycled: Recycled = Recycled()
    """What the model held likely in earlier steps."""
    path_trust: float = 0.0
    """Added certainty, once a parent was accepted, that the text repeats itself. Odds of small
    probabilities grow by this part."""
    min_left: float = 0.0
    """Shorter contexts are asked while at least this much probability is left."""
    cut_left: float = 0.0
    cut_share: float = 0.0
    """Once a tree has enough guesses, a successor needs some probability to be chosen. Contexts are
    not asked when less than `cut_left` of that is left; shares below `cut_share` of it are left
    out."""
    min_left_for_heads: float = 0.0
    """Heads are asked if at least this much probability is left."""
    long_order: int = 8
    min_order: int = 0
    """Length of the shortest context that is asked."""
