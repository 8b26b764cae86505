"""Sorting more rows than memory holds: sorted runs on disk, merged part by part.

Rows are >u4[n, width]. As bytes, they have the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

RUN_BYTES = 64 << 20
"""Size of the rows that are sorted at once. Sorting takes about eight times this memory."""

_SAMPLES = 1024
"""Rows of each run among which splitters are chosen."""
_CHUNK = 1 << 22


class Run(NamedTuple):
    """Sorted rows >u4[n, width] and a value [n] for each."""

    rows: np.ndarray
    values: np.ndarray

    @property
    def keys(self) -> np.ndarray:
        """The rows as bytes, S[n]."""
        return _keys(self.rows)


def _keys(rows: np.ndarray) -> np.ndarray:
    return rows.view(f"S{4 * rows.shape[1]}").ravel()


def _joined(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Return several arrays of rows as one of a width."""
    # Not np.concatenate, which gives the machine's own byte order.
    result = np.zeros((sum(map(len, rows)), width), dtype=">u4")
    begin = 0
    for each in rows:
        result[begin : begin + len(each), : each.shape[1]] = each
        begin += len(each)
    return result


def _sorted(rows: list[np.ndarray], values: list[np.ndarray], width: int) -> Run:
    """Return the rows of several arrays in one, sorted; equal ones stay in their order."""
    together = _joined(rows, width)
    order = np.argsort(_keys(together), kind="stable")
    return Run(together[order], np.concatenate(values)[order])


def sorted_runs(batches: Iterable[tuple[np.ndarray, np.ndarray]], folder: Path) -> Iterator[Run]:
    """Yield runs of at most :data:`RUN_BYTES`; those that are followed by another lie on disk."""
    rows: list[np.ndarray] = []
    values: list[np.ndarray] = []
    count = width = number = 0
    for new_rows, new_values in batches:
        new_width = max(width, new_rows.shape[1])
        if count and (count + len(new_rows)) * new_width * 4 > RUN_BYTES:
            yield _spilled(_sorted(rows, values, width), folder / f"run-{number}")
            rows, values = [], []
            count, number, new_width = 0, number + 1, new_rows.shape[1]
        rows.append(new_rows)
        values.append(new_values)
        count += len(new_rows)
        width = new_width
    if count:
        yield _sorted(rows, values, width)


def _spilled(run: Run, path: Path) -> Run:
    run.rows.tofile(path.with_suffix(".rows"))
    run.values.tofile(path.with_suffix(".values"))
    return Run(
        np.memmap(path.with_suffix(".rows"), dtype=">u4", mode="r", shape=run.rows.shape),
        np.memmap(path.with_suffix(".values"), dtype=run.values.dtype, mode="r"),
    )


def parts(runs: list[Run], width: int) -> Iterator[Run]:
    """Merge sorted runs into consecutive sorted parts, each about as large as a run may be."""
    if len(runs) == 1:
        yield runs[0]
        return
    total = sum(len(run.rows) for run in runs)
    count = -(-total * width * 4 // RUN_BYTES)
    steps = [max(1, len(run.rows) // _SAMPLES) for run in runs]
    every = [run.rows[::step] for run, step in zip(runs, steps, strict=True)]
    samples = np.sort(_keys(_joined(every, width)))
    splitters = samples[np.linspace(0, len(samples), count, endpoint=False).astype(int)[1:]]
    bounds = [
        [0, *(np.searchsorted(run.keys, splitters) if count > 1 else ()), len(run.rows)]
        for run in runs
    ]
    for number in range(count):
        slices = [slice(bound[number], bound[number + 1]) for bound in bounds]
        rows = [run.rows[part] for run, part in zip(runs, slices, strict=True)]
        values = [run.values[part] for run, part in zip(runs, slices, strict=True)]
        if any(map(len, rows)):
            yield _sorted(rows, values, width)


def append(path: Path, array: np.ndarray) -> None:
    """Add an array to the end of a file."""
    # Not kept open: long items have more files than a process may open.
    with path.open("ab") as file:
        array.tofile(file)


def chunks(path: Path, kind: DTypeLike) -> Iterator[np.ndarray]:
    """Yield the content of a file in parts."""
    with path.open("rb") as file:
        while len(part := np.fromfile(file, dtype=kind, count=_CHUNK)):
            yield part
