"""Monotone regression."""

from __future__ import annotations

import numpy as np


def non_decreasing(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the non-decreasing sequence closest to `values` in weighted least squares, by pooling
    adjacent violators."""
    if (values[1:] >= values[:-1]).all():
        return values
    blocks: list[list[float]] = []  # value, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            value, weight, length = blocks.pop()
            left = blocks[-1]
            left[0] = (left[0] * left[1] + value * weight) / (left[1] + weight)
            left[1] += weight
            left[2] += length
    return np.repeat([b[0] for b in blocks], [int(b[2]) for b in blocks])
