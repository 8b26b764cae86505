"""The nodes that bring the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations
from typing import NamedTuple

import numpy as np


class Allocation(NamedTuple):
    """A choice of nodes over all requests of a step."""

    keep: tuple[np.ndarray, ...]
    """bool [N] per request; a kept node's parent is kept too."""
    tokens_per_second: float
    """Expected, over all requests."""


def best_allocation(
    probabilities: Sequence[np.ndarray], num_rows: int, seconds: np.ndarray
) -> Allocation:
    """Choose nodes across all requests of the next step.

    With rows r, chosen nodes C and step time t, the step brings ``r + sum_{i in C} p_i`` tokens in
    ``t(r + |C|)`` seconds. For any number of nodes the best are those of the largest p, and as no
    child is likelier than its parent they form trees; so one sort and one pass find the optimum.

    Args:
        probabilities: float [N] per request, that node i is accepted; never larger than the
            parent's, and parents come first.
        num_rows: requests that get a token from the step, with a tree or without.
        seconds: float [num_rows + total nodes + 1], step time by number of tokens.
    """
    sizes = [len(p) for p in probabilities]
    total = sum(sizes)
    flat = np.concatenate([np.asarray(p, dtype=np.float64) for p in probabilities] or [[]])
    order = np.argsort(-flat, kind="stable")
    expected = num_rows + np.concatenate([[0.0], np.cumsum(flat[order])])
    rate = expected / seconds[num_rows : num_rows + total + 1]
    best = int(np.argmax(rate))
    keep = np.zeros(total, dtype=bool)
    keep[order[:best]] = True
    return Allocation(tuple(split(keep, sizes)), float(rate[best]))


def split(values: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Views of `values`, one after the other; `numpy.split` takes several times as long."""
    return [values[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]


def best_allocation_reference(
    probabilities: Sequence[np.ndarray],
    parents: Sequence[np.ndarray],
    num_rows: int,
    seconds: np.ndarray,
) -> float:
    """The best rate over all sets of nodes that are trees, by trying them all; few nodes only."""
    nodes = [(r, i) for r, p in enumerate(probabilities) for i in range(len(p))]
    best = 0.0
    for size in range(len(nodes) + 1):
        for chosen in combinations(nodes, size):
            closed = all(parents[r][i] < 0 or (r, int(parents[r][i])) in chosen for r, i in chosen)
            if closed:
                brought = num_rows + sum(float(probabilities[r][i]) for r, i in chosen)
                best = max(best, brought / seconds[num_rows + size])
    return best
