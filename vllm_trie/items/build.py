"""Building an item trie from any number of items in bounded memory.

1. Batches of items are collected to a run of at most :data:`RUN_BYTES`, sorted, and written to a
   temporary file, unless it is the only run.
2. Samples of all runs give splitters. The rows between two splitters, of all runs, are sorted
   together: a part of about one run. The parts follow one another in order.
3. Each part adds the nodes that its rows begin to the files of their levels.
4. The files of the levels, one after another, are the arrays of the trie.

A row is an item as big-endian uint32 of token + 1, padded with zeros: as bytes, rows have the order
of their items, and an item comes before those that it is the beginning of.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vllm_trie.items.sources import Batch
from vllm_trie.items.trie import ItemId
from vllm_trie.items.trie_file import FORMAT, MAX_NODES, ItemsError, ItemsHeader

RUN_BYTES = 64 << 20
"""Size of the rows that are sorted at once. The build's memory is about eight times this."""

_SAMPLES = 1024
"""Rows of each run among which splitters are chosen."""
_CHUNK = 1 << 22

Duplicates = Literal["refuse", "first"]


def build_items(
    path: Path,
    batches: Iterable[Batch],
    tokenizer: str | None = None,
    duplicates: Duplicates = "refuse",
) -> ItemsHeader:
    """Write the trie of all items; an older file is replaced once the new one is complete.

    Args:
        path: The file. Temporary files of about the size of the items lie next to it.
        batches: The items.
        tokenizer: Fingerprint of the tokenizer, for the header.
        duplicates: Refuse two items of the same tokens, or keep the first one.

    Raises:
        ItemsError: There are no items, too many, or duplicates.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as name:
        folder = Path(name)
        ids = _IdFile(folder)
        runs = list(_sorted_runs(_with_values(batches, ids), folder))
        if not runs:
            raise ItemsError("the catalogue has no items; name files with at least one")
        width = max(run.rows.shape[1] for run in runs)
        levels = _Levels(folder, width, ids, duplicates)
        for part in _parts(runs, width):
            levels.add(part)
        header = levels.header(tokenizer)
        FORMAT.write(path, header, levels.body())
    return header


class Run(NamedTuple):
    """Sorted items: rows >u4[n, width] and values int64[n]."""

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
    """Return the items of several arrays in one, sorted; equal ones stay in their order."""
    together = _joined(rows, width)
    order = np.argsort(_keys(together), kind="stable")
    return Run(together[order], np.concatenate(values)[order])


# -- runs ------------------------------------------------------------------------------------------


class _IdFile:
    """Ids on their way to the trie: integers as values, strings in a file, in the input's order."""

    def __init__(self, folder: Path) -> None:
        self.kind: type | None = None
        self.num_texts = 0
        self.num_bytes = 0
        self._lengths = folder / "id-lengths"
        self._texts = folder / "id-texts"

    def add(self, ids: list[ItemId] | np.ndarray) -> np.ndarray:
        """Return int64[n], the values of ids: themselves, or their places in the file.

        Raises:
            ItemsError: Some ids are integers and others strings.
        """
        kind = int if isinstance(ids, np.ndarray) else type(ids[0])
        self.kind = self.kind or kind
        if kind is not self.kind:
            raise ItemsError("some ids are strings and others integers; use one type for all")
        if kind is int:
            return np.asarray(ids, dtype=np.int64)
        texts = [str(each).encode() for each in ids]
        _append(self._lengths, np.array([len(text) for text in texts], dtype="<i8"))
        _append(self._texts, np.frombuffer(b"".join(texts), dtype="u1"))
        values = np.arange(self.num_texts, self.num_texts + len(texts))
        self.num_texts += len(texts)
        self.num_bytes += sum(map(len, texts))
        return values

    def text(self, value: int) -> str:
        """Return the id of a value."""
        if self.kind is int:
            return str(value)
        lengths = np.memmap(self._lengths, dtype="<i8", mode="r")
        begin = int(lengths[:value].sum())
        with self._texts.open("rb") as file:
            file.seek(begin)
            return repr(file.read(int(lengths[value])).decode())

    def offsets(self) -> Iterator[np.ndarray]:
        """Yield int64[num_texts + 1] in parts."""
        total = 0
        yield np.zeros(1, dtype="<i8")
        for lengths in _chunks(self._lengths, "<i8"):
            ends = total + np.cumsum(lengths)
            total = int(ends[-1])
            yield ends

    def texts(self) -> Iterator[np.ndarray]:
        return _chunks(self._texts, "u1")


def _with_values(batches: Iterable[Batch], ids: _IdFile) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for batch in batches:
        if len(batch.rows):
            yield batch.rows, ids.add(batch.ids)


def _sorted_runs(batches: Iterable[tuple[np.ndarray, np.ndarray]], folder: Path) -> Iterator[Run]:
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
        np.memmap(path.with_suffix(".values"), dtype=np.int64, mode="r"),
    )


def _parts(runs: list[Run], width: int) -> Iterator[Run]:
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


# -- levels ----------------------------------------------------------------------------------------


@dataclass
class _Level:
    """Nodes of one depth, in files: tokens, places of first children, item ends, item values."""

    tokens: Path
    first_child: Path
    """For each node, its first child's place within the next level."""
    terminals: Path
    """Places within this level."""
    values: Path
    num_nodes: int = 0
    num_items: int = 0
    start: int = 0
    """Number of the level's first node."""


class _Levels:
    """The levels of the trie, which grow as sorted items are added."""

    def __init__(self, folder: Path, width: int, ids: _IdFile, duplicates: Duplicates) -> None:
        self._levels = [
            _Level(
                tokens=folder / f"tokens-{depth}",
                first_child=folder / f"first-child-{depth}",
                terminals=folder / f"terminals-{depth}",
                values=folder / f"values-{depth}",
            )
            for depth in range(width)
        ]
        self._ids = ids
        self._duplicates = duplicates
        self._last = np.zeros(width, dtype=">u4")
        self._last_value = 0

    def add(self, part: Run) -> None:
        """Add items that come after all before.

        Raises:
            ItemsError: Items have the same tokens.
        """
        rows, values = self._without_duplicates(part)
        if not len(rows):
            return
        before = np.concatenate([self._last[None], rows[:-1]])
        begins = np.logical_or.accumulate(rows != before, axis=1) & (rows != 0)
        lengths = (rows != 0).sum(axis=1)
        places = [level.num_nodes + np.cumsum(begins[:, d]) for d, level in enumerate(self._levels)]
        for depth, level in enumerate(self._levels):
            new = begins[:, depth]
            # Nodes of the next level that come before this row.
            if depth + 1 < len(self._levels):
                children = places[depth + 1] - begins[:, depth + 1]
            else:
                children = np.zeros(len(rows), dtype=np.int64)
            _append(level.tokens, rows[new, depth].astype("<i4") - 1)
            _append(level.first_child, children[new].astype("<i8"))
            ends = lengths == depth + 1
            _append(level.terminals, (places[depth][ends] - 1).astype("<i8"))
            _append(level.values, values[ends].astype("<i8"))
            level.num_nodes += int(new.sum())
            level.num_items += int(ends.sum())
        self._last, self._last_value = rows[-1], int(values[-1])

    def _without_duplicates(self, part: Run) -> Run:
        same = np.empty(len(part.rows), dtype=bool)
        same[0] = np.array_equal(part.rows[0], self._last)
        same[1:] = part.keys[1:] == part.keys[:-1]
        if not same.any():
            return part
        if self._duplicates == "refuse":
            place = int(np.argmax(same))
            row = part.rows[place]
            first = int(part.values[place - 1]) if place else self._last_value
            raise ItemsError(
                f"the items {self._ids.text(first)} and {self._ids.text(int(part.values[place]))} "
                f"have the same tokens {(row[row != 0].astype(int) - 1).tolist()}; remove one of "
                "them, or keep the first of each with --duplicates first"
            )
        return Run(part.rows[~same], part.values[~same])

    def header(self, tokenizer: str | None) -> ItemsHeader:
        """Return the header of the trie, and number its nodes.

        Raises:
            ItemsError: It has too many nodes.
        """
        start = 1
        for level in self._levels:
            level.start = start
            start += level.num_nodes
        if start > MAX_NODES:
            raise ItemsError(
                f"the catalogue's trie has {start} nodes, at most {MAX_NODES} are possible; "
                "divide the catalogue"
            )
        lengths = [depth for depth, level in enumerate(self._levels, 1) if level.num_items]
        most, previous = 0, 0
        for starts in self._first_child():
            most = max(most, int(np.diff(starts, prepend=previous).max()))
            previous = int(starts[-1])
        texts = self._ids.kind is str
        return ItemsHeader(
            num_items=sum(level.num_items for level in self._levels),
            num_nodes=start,
            min_length=lengths[0],
            max_length=lengths[-1],
            max_token=max(
                int(part.max()) for level in self._levels for part in _chunks(level.tokens, "<i4")
            ),
            max_children=most,
            ids="str" if texts else "int",
            num_ids=self._ids.num_texts,
            id_bytes=self._ids.num_bytes,
            tokenizer=tokenizer,
        )

    def body(self) -> Iterator[np.ndarray]:
        """Yield the arrays of the file, in parts."""
        for level in self._levels:
            yield from _chunks(level.values, "<i8")
        if self._ids.kind is str:
            yield from self._ids.offsets()
        yield from self._first_child()
        yield np.array([-1], dtype="<i4")
        for level in self._levels:
            yield from _chunks(level.tokens, "<i4")
        for level in self._levels:
            for part in _chunks(level.terminals, "<i8"):
                yield (part + level.start).astype("<i4")
        if self._ids.kind is str:
            yield from self._ids.texts()

    def _first_child(self) -> Iterator[np.ndarray]:
        yield np.array([1], dtype="<i4")
        end = self._levels[-1].start + self._levels[-1].num_nodes
        starts = [level.start for level in self._levels[1:]] + [end]
        for level, start in zip(self._levels, starts, strict=True):
            for part in _chunks(level.first_child, "<i8"):
                yield (part + start).astype("<i4")
        yield np.array([end], dtype="<i4")


def _append(path: Path, array: np.ndarray) -> None:
    # Not kept open: long items have more files than a process may open.
    with path.open("ab") as file:
        array.tofile(file)


def _chunks(path: Path, kind: str) -> Iterator[np.ndarray]:
    """Yield the content of a file in parts."""
    with path.open("rb") as file:
        while len(part := np.fromfile(file, dtype=kind, count=_CHUNK)):
            yield part
