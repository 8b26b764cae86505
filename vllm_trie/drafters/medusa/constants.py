"""Constants of the blend of the text's n-grams with the heads."""

from __future__ import annotations

from typing import NamedTuple

MIN_ORDER = 1
"""Shortest context that has a say; what is frequent in general, the heads know better."""

MIN_LEFT = 1e-6
"""The heads are not asked if no more probability than this is left to them."""


class TextTrust(NamedTuple):
    """How far the text's counts are believed, by context length: Pitman-Yor parameters. Entry 0 is
    the empty context, the last one holds for all longer ones too."""

    concentration: tuple[float, ...]
    """theta: pseudo-observations of "something else", at least 0."""
    discount: tuple[float, ...]
    """d: taken off each successor's count, in [0, 1)."""


TEXT = TextTrust((20.0, 20.0, 8.0, 4.0, 2.0, 1.0, 0.5), (0.8, 0.8, 0.7, 0.7, 0.7, 0.6, 0.5))
"""Chosen on held-out text: see docs/medusa.md."""


def at_order(values: tuple[float, ...], order: int) -> float:
    """The constant for contexts of `order` tokens."""
    return values[min(order, len(values) - 1)]
