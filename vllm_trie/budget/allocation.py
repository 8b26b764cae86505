"""The set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.tree.batch import LIBRARY

_TIE = 1e-12  # of probability for each earlier node; too small to matter otherwise


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
        num_rows: Requests that get a token from the step, with or without a tree.
        seconds: float [num_rows + num_nodes + 1], step time by number of tokens.
    """
    num_nodes = len(probabilities)
    # A parent comes before its child, also where they are equally likely.
    order = np.argsort(np.arange(num_nodes) * _TIE - probabilities)
    expected = np.empty(num_nodes + 1)
    expected[0] = num_rows
    expected[1:] = probabilities[order]
    rate = expected.cumsum() / seconds[num_rows : num_rows + num_nodes + 1]
    best = int(rate.argmax())
    keep = np.zeros(num_nodes, dtype=bool)
    keep[order[:best]] = True
    return Allocation(keep, float(rate[best]))


class Choice(NamedTuple):
    """The nodes of a batch's trees that are worth their time."""

    keep: np.ndarray
    """bool [nodes of all trees]."""
    expected: list[float]
    """Accepted tokens of each tree's kept nodes, before the factors."""
    tokens_per_second: float


def choose_nodes(
    predicted: Sequence[np.ndarray],
    factors: Sequence[float],
    points: tuple[np.ndarray, np.ndarray],
    num_rows: int,
    seconds: np.ndarray,
) -> Choice:
    """Choose nodes with :func:`best_allocation`, from what a drafter predicts.

    Args:
        predicted: float32, the probabilities of each tree's nodes.
        factors: Of each tree, multiply the acceptance rates.
        points: Predicted probabilities and their acceptance rates, to interpolate in.
        num_rows, seconds: See there.
    """
    sizes = np.array(list(map(len, predicted)), dtype=np.int32)
    joined = np.concatenate(predicted)
    if LIBRARY.is_available():
        keep = np.empty(len(joined), dtype=bool)
        expected, of_trees = np.empty(len(sizes)), np.array(factors, dtype=np.float64)
        seconds = np.ascontiguousarray(seconds)
        rate = LIBRARY.require().trees_choose(
            *(joined.ctypes.data, sizes.ctypes.data, len(sizes), of_trees.ctypes.data),
            *(points[0].ctypes.data, points[1].ctypes.data, len(points[0])),
            *(seconds.ctypes.data, num_rows, _TIE, keep.ctypes.data, expected.ctypes.data),
        )
        if rate < 0.0:
            raise MemoryError("no memory to choose nodes")
        return Choice(keep, expected.tolist(), rate)
    calibrated = np.interp(joined, *points)
    scaled = np.minimum(calibrated * np.repeat(factors, sizes), 1.0)
    allocation = best_allocation(scaled, num_rows, seconds)
    ends = np.cumsum(sizes)[:-1]
    parts = np.split(calibrated * allocation.keep, ends)
    return Choice(
        allocation.keep, [float(part.sum()) for part in parts], allocation.tokens_per_second
    )
