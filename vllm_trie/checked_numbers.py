"""Learned numbers that come from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def checked(
    state: Mapping[str, Sequence[float]], name: str, length: int, least: float, most: float
) -> np.ndarray:
    """Return float64 [length], the numbers of this name.

    Raises:
        ValueError: they are missing, of another number, or not all in [least, most].
    """
    values = np.array(state.get(name, ()), dtype=np.float64)
    if values.shape != (length,):
        raise ValueError(f"{name} has {values.size} numbers instead of {length}")
    if not ((values >= least) & (values <= most)).all():  # not a number is neither
        raise ValueError(f"{name} has numbers outside of [{least:g}, {most:g}]")
    return values
