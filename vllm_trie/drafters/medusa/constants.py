"""Constants of the blend of the text's n-grams with the heads.

The concentration and the discount are fitted on the shipped model; docs/medusa.md shows how little
they matter. The compiled code gets all of them from here.
"""

from __future__ import annotations

MIN_ORDER = 1
"""Shortest context that is asked; what is frequent in general, the heads know better."""

MIN_LEFT = 1e-6
"""The heads are not asked if no more probability than this is left to them."""

CONCENTRATION = 0.2
"""theta of the Pitman-Yor process: pseudo-observations of "something else", at least 0."""

DISCOUNT = 0.7
"""d of the Pitman-Yor process: taken off each successor's count, in [0, 1). Both hold for contexts
of every length."""
