"""Fixed trees that are fitted to a model's heads."""

from __future__ import annotations

import heapq

import numpy as np

from vllm_trie.drafters.medusa.trees import Path


def fit_paths(accuracies: np.ndarray, num_nodes: int) -> tuple[Path, ...]:
    """Return the fixed tree with the largest expected number of accepted tokens.

    Args:
        accuracies: [K, m], how often the candidate of each rank is right, as if the heads were
            independent.

    Source: Medusa, section 2.3.3: nodes are added one by one, the most accurate path first.
    """
    heap: list[tuple[float, Path]] = [(-1.0, ())]
    chosen: list[Path] = []
    while heap and len(chosen) <= num_nodes:
        negative, path = heapq.heappop(heap)
        chosen.append(path)
        if len(path) < len(accuracies):
            for rank, share in enumerate(accuracies[len(path)].tolist()):
                heapq.heappush(heap, (negative * share, (*path, rank)))
    return tuple(chosen[1:])
