"""The set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

_TIE = 1e-12  # of probability for each earlier node; too small to matter otherwise


class Choice(NamedTuple):
    """The nodes of a batch's trees that are worth their time."""

    keep: np.ndarray
    """bool [nodes of all trees]; a kept node's parent is kept too."""
    expected: list[float]
    """Accepted tokens of each tree's kept nodes, before the factors."""
    tokens_per_second: float
    """Expected, over all requests."""


def choose_nodes(
    predicted: Sequence[np.ndarray],
    factors: Sequence[float],
    points: tuple[np.ndarray, np.ndarray],
    num_rows: int,
    seconds: np.ndarray,
) -> Choice:
    """Choose nodes across all requests of the next step.

    With rows r, chosen nodes C and step time t, the step yields ``r + sum_{i in C} p_i`` tokens in
    ``t(r + |C|)`` seconds. The best n nodes are those of the largest p, for any n. They form trees,
    because no child is likelier than its parent; so one sort and one pass find the optimum.

    Args:
        predicted: float [num_nodes] of each tree, at least one node: what the drafter predicts,
            never larger than the parent's; parents come first.
        factors: Of each tree, multiply the acceptance rates.
        points: Predicted probabilities and their acceptance rates, to interpolate in.
        num_rows: Requests that get a token from the step, with or without a tree.
        seconds: float [num_rows + nodes of all trees + 1], step time by number of tokens.
    """
    sizes = list(map(len, predicted))
    rates = np.interp(np.concatenate(predicted), *points)
    probabilities = np.minimum(rates * np.repeat(factors, sizes), 1.0)
    # A parent comes before its child, also where they are equally likely.
    order = np.argsort(np.arange(len(rates)) * _TIE - probabilities)
    tokens = np.concatenate([[num_rows], probabilities[order]]).cumsum()
    tokens_per_second = tokens / seconds[num_rows : num_rows + len(tokens)]
    best = int(tokens_per_second.argmax())
    keep = np.zeros(len(rates), dtype=bool)
    keep[order[:best]] = True
    expected = np.add.reduceat(rates * keep, [0, *accumulate(sizes[:-1])])
    return Choice(keep, expected.tolist(), float(tokens_per_second[best]))
