"""The set of nodes with the most expected tokens per second."""

from __future__ import annotations

import numpy as np

_TIE = 1e-12  # of probability for each earlier node; too small to matter otherwise


def choose_nodes(
    rates: np.ndarray, num_requests: int, seconds: np.ndarray
) -> tuple[np.ndarray, float]:
    """Choose nodes across all requests of the next step.

    With r requests, chosen nodes C and step time t, the step yields ``r + sum_{i in C} p_i`` tokens
    in ``t(r + |C|)`` seconds. The best n nodes are those of the largest p, for any n. They form
    trees, because no child is likelier than its parent; so one sort and one pass find the optimum.

    Args:
        rates: float [nodes of all trees], at least one: expected acceptance rates, never larger
            than the parent's; parents come first.
        num_requests: Those that get a token from the step, with or without a tree.
        seconds: float [num_requests + nodes of all trees + 1], step time by number of tokens.

    Returns:
        bool [nodes of all trees], the chosen ones; a chosen node's parent is chosen too. And the
        expected tokens per second, over all requests.
    """
    # A parent comes before its child, also where they are equally likely.
    order = np.argsort(np.arange(len(rates)) * _TIE - rates)
    tokens = np.concatenate([[num_requests], rates[order]]).cumsum()
    tokens_per_second = tokens / seconds[num_requests : num_requests + len(tokens)]
    best = int(tokens_per_second.argmax())
    keep = np.zeros(len(rates), dtype=bool)
    keep[order[:best]] = True
    return keep, float(tokens_per_second[best])
