"""The set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np


class Allocation(NamedTuple):
    """A choice of nodes over all requests of a step."""

    keep: np.ndarray
    """bool [num_nodes]; a kept node's parent is kept too."""
    tokens_per_second: float
    """Expected, over all requests."""


def best_allocation(probabilities: np.ndarray, num_rows: int, seconds: np.ndarray) -> Allocation:
    """Choose nodes across all requests of the next step.

    With rows r, chosen nodes C and step time t, the step yields ``r + sum_{i in C} p_i`` tokens in
    ``t(r + |C|)`` seconds. The best n nodes are those of the largest p, for any n. They form trees,
    because no child is likelier than its parent; so one sort and one pass find the optimum.

    Args:
        probabilities: float [num_nodes], acceptance probabilities, one request after another;
            never larger than the parent's, and parents come first.
        num_rows: requests that get a token from the step, with or without a tree.
        seconds: float [num_rows + num_nodes + 1], step time by number of tokens.
    """
    num_nodes = len(probabilities)
    order = np.argsort(-probabilities, kind="stable")
    expected = np.empty(num_nodes + 1)
    expected[0] = num_rows
    expected[1:] = probabilities[order]
    rate = expected.cumsum() / seconds[num_rows : num_rows + num_nodes + 1]
    best = int(rate.argmax())
    keep = np.zeros(num_nodes, dtype=bool)
    keep[order[:best]] = True
    return Allocation(keep, float(rate[best]))


def best_allocation_reference(
    probabilities: Sequence[np.ndarray],
    parents: Sequence[np.ndarray],
    num_rows: int,
    seconds: np.ndarray,
) -> float:
    """Return the best rate over all sets of nodes that are trees, by trying them all."""
    nodes = [(r, i) for r, p in enumerate(probabilities) for i in range(len(p))]
    best = 0.0
    for size in range(len(nodes) + 1):
        for chosen in combinations(nodes, size):
            closed = all(parents[r][i] < 0 or (r, int(parents[r][i])) in chosen for r, i in chosen)
            if closed:
                tokens = num_rows + sum(float(probabilities[r][i]) for r, i in chosen)
                best = max(best, tokens / seconds[num_rows + size])
    return best
