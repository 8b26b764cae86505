"""The set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TIE = 1e-12  # of probability for each earlier node; too small to matter otherwise


def choose_nodes(
    predicted: Sequence[np.ndarray],
    points: tuple[np.ndarray, np.ndarray],
    num_rows: int,
    seconds: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Choose nodes across all requests of the next step.

    With rows r, chosen nodes C and step time t, the step yields ``r + sum_{i in C} p_i`` tokens in
    ``t(r + |C|)`` seconds. The best n nodes are those of the largest p, for any n. They form trees,
    because no child is likelier than its parent; so one sort and one pass find the optimum.

    Args:
        predicted: float [num_nodes] of each tree, at least one node: what the drafter predicts,
            never larger than the parent's; parents come first.
        points: Predicted probabilities and their acceptance rates, to interpolate in.
        num_rows: Requests that get a token from the step, with or without a tree.
        seconds: float [num_rows + nodes of all trees + 1], step time by number of tokens.

    Returns:
        bool [nodes of all trees], the chosen ones; a chosen node's parent is chosen too. And the
        expected tokens per second, over all requests.
    """
    rates = np.interp(np.concatenate(predicted), *points)
    # A parent comes before its child, also where they are equally likely.
    order = np.argsort(np.arange(len(rates)) * _TIE - rates)
    tokens = np.concatenate([[num_rows], rates[order]]).cumsum()
    tokens_per_second = tokens / seconds[num_rows : num_rows + len(tokens)]
    best = int(tokens_per_second.argmax())
    keep = np.zeros(len(rates), dtype=bool)
    keep[order[:best]] = True
    return keep, float(tokens_per_second[best])
