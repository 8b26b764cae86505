"""Building an item trie from any number of items in bounded memory.

1. Batches of items are collected to a run of at most some size, sorted, and written to a
   temporary file, unless it is the only run.
2. Samples of all runs give splitters. The rows between two splitters, of all runs, are sorted
   together: a part of about one run. The parts follow one another in order.
3. Each part adds the nodes that its rows begin to the files of their levels.
4. The files of the levels, one after another, are the arrays of the trie.
5. The keys of the ids are sorted in the same way, for the index.

A row is an item as big-endian uint32 of token + 1, padded with zeros: as bytes, rows have the order
of their items, and an item comes before those that it is the beginning of.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vllm_trie.items.ids import IdFile
from vllm_trie.items.runs import Run, append, chunks, parts, sorted_runs
from vllm_trie.items.sources import Batch
from vllm_trie.items.trie_file import FORMAT, MAX_NODES, ItemsError, ItemsHeader

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
        ids = IdFile(folder)
        runs = list(sorted_runs(_with_values(batches, ids), folder))
        if not runs:
            raise ItemsError("the catalogue has no items; name files with at least one")
        width = max(run.rows.shape[1] for run in runs)
        levels = _Levels(folder, width, ids, duplicates)
        for part in parts(runs, width):
            levels.add(part)
        header = levels.header(tokenizer)
        FORMAT.write(path, header, levels.body())
    return header


_ITEM = np.dtype([("value", "<i8"), ("weight", "<f4")])


def _with_values(batches: Iterable[Batch], ids: IdFile) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for batch in batches:
        if len(batch.rows):
            items = np.zeros(len(batch.rows), dtype=_ITEM)
            items["value"] = ids.add(batch.ids)
            if batch.weights is not None:
                items["weight"] = batch.weights
            yield batch.rows, items


# -- levels ----------------------------------------------------------------------------------------


@dataclass
class _Level:
    """Nodes of one depth, in files: tokens, places of first children, item ends and items."""

    tokens: Path
    first_child: Path
    """For each node, its first child's place within the next level."""
    terminals: Path
    """Places within this level."""
    items: Path
    """Of type ``_ITEM``, in the order of the terminals."""
    num_nodes: int = 0
    num_items: int = 0
    start: int = 0
    """Number of the level's first node."""


class _Levels:
    """The levels of the trie, which grow as sorted items are added."""

    def __init__(self, folder: Path, width: int, ids: IdFile, duplicates: Duplicates) -> None:
        self._levels = [
            _Level(
                tokens=folder / f"tokens-{depth}",
                first_child=folder / f"first-child-{depth}",
                terminals=folder / f"terminals-{depth}",
                items=folder / f"items-{depth}",
            )
            for depth in range(width)
        ]
        self._ids = ids
        self._duplicates = duplicates
        self._last = np.zeros(width, dtype=">u4")
        self._last_value = 0
        self._weights = False

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
            append(level.tokens, rows[new, depth].astype("<i4") - 1)
            append(level.first_child, children[new].astype("<i8"))
            ends = lengths == depth + 1
            append(level.terminals, (places[depth][ends] - 1).astype("<i8"))
            append(level.items, values[ends])
            level.num_nodes += int(new.sum())
            level.num_items += int(ends.sum())
        self._last, self._last_value = rows[-1], int(values["value"][-1])
        self._weights |= bool(values["weight"].any())

    def _without_duplicates(self, part: Run) -> Run:
        same = np.empty(len(part.rows), dtype=bool)
        same[0] = np.array_equal(part.rows[0], self._last)
        same[1:] = part.keys[1:] == part.keys[:-1]
        if not same.any():
            return part
        if self._duplicates == "refuse":
            place = int(np.argmax(same))
            row = part.rows[place]
            values = part.values["value"]
            first = int(values[place - 1]) if place else self._last_value
            raise ItemsError(
                f"the items {self._ids.text(first)} and {self._ids.text(int(values[place]))} "
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
                int(part.max()) for level in self._levels for part in chunks(level.tokens, "<i4")
            ),
            max_children=most,
            ids="str" if texts else "int",
            num_ids=self._ids.num_texts,
            id_bytes=self._ids.num_bytes,
            weights=self._weights,
            tokenizer=tokenizer,
        )

    def body(self) -> Iterator[np.ndarray]:
        """Yield the arrays of the file, in parts."""
        self._ids.sort(self._of_items("value"))
        yield from self._of_items("value")
        if self._ids.kind is str:
            yield from self._ids.offsets()
        yield from self._ids.sorted_keys()
        yield from self._first_child()
        yield np.array([-1], dtype="<i4")
        for level in self._levels:
            yield from chunks(level.tokens, "<i4")
        for level in self._levels:
            for part in chunks(level.terminals, "<i8"):
                yield (part + level.start).astype("<i4")
        yield from self._ids.sorted_numbers()
        if self._weights:
            yield from self._of_items("weight")
        if self._ids.kind is str:
            yield from self._ids.texts()

    def _of_items(self, field: str) -> Iterator[np.ndarray]:
        for level in self._levels:
            for part in chunks(level.items, _ITEM):
                yield np.ascontiguousarray(part[field])

    def _first_child(self) -> Iterator[np.ndarray]:
        yield np.array([1], dtype="<i4")
        end = self._levels[-1].start + self._levels[-1].num_nodes
        starts = [level.start for level in self._levels[1:]] + [end]
        for level, start in zip(self._levels, starts, strict=True):
            for part in chunks(level.first_child, "<i8"):
                yield (part + start).astype("<i4")
        yield np.array([end], dtype="<i4")
