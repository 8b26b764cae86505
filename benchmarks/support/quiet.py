"""Tell whether a machine was quiet during a benchmark: the same fixed work before and after it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import numpy as np

MOST_CHANGE = 0.05
"""Largest share by which the later probe of a quiet run differs from the earlier one."""
_PARTS = 9
_ROUNDS = 800
_NUM_VALUES = 1 << 20


class Probe(NamedTuple):
    """Seconds that the fixed work took before and after a run."""

    before: float
    after: float

    @property
    def change(self) -> float:
        """Difference of the two, as a share of the shorter one."""
        return abs(self.after - self.before) / min(self)

    @property
    def is_quiet(self) -> bool:
        """Whether the run counts as quiet."""
        return self.change < MOST_CHANGE

    def __str__(self) -> str:
        """Describe the probe in one line."""
        verdict = "quiet" if self.is_quiet else "not quiet"
        return f"probe {self.before:.2f} s before, {self.after:.2f} s after: {verdict}"


def probe_seconds() -> float:
    """Multiply arrays on every core, larger than most caches; return the median part's seconds."""

    def work(_: int) -> None:
        values, product = np.ones(_NUM_VALUES, np.float32), np.empty(_NUM_VALUES, np.float32)
        for _ in range(_ROUNDS):
            np.multiply(values, values, out=product)  # without the interpreter's lock

    num_cores = len(os.sched_getaffinity(0))
    seconds = []
    with ThreadPoolExecutor(num_cores) as pool:
        for _ in range(_PARTS):
            start = time.perf_counter()
            list(pool.map(work, range(num_cores)))
            seconds.append(time.perf_counter() - start)
    return median(seconds)
