"""Building an item trie in memory: the items are sorted once, and each level is read off the rows.

A row is an item as big-endian uint32 of token + 1, padded with zeros: as bytes, rows have the order
of their items, and an item comes before those that it is the beginning of.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from vllm_trie.extras.items.sources import Batch
from vllm_trie.extras.items.trie import text_key
from vllm_trie.extras.items.trie_file import FORMAT, MAX_NODES, ItemsError, ItemsHeader

Duplicates = Literal["refuse", "first"]


class _Ids(NamedTuple):
    """Ids in the order of the input.

    Attributes:
        values: int64 [items], integers, or the places of texts.
        texts: UTF-8 of ids that are strings; None for integers.
    """

    values: np.ndarray
    texts: list[bytes] | None

    def name(self, place: int) -> str:
        """Return an id for messages."""
        return str(self.values[place]) if self.texts is None else repr(self.texts[place].decode())

    def keys(self) -> np.ndarray:
        """Return int64 [items], by which items are found."""
        if self.texts is None:
            return self.values
        return np.array([text_key(text) for text in self.texts], dtype=np.int64)


class _Levels(NamedTuple):
    """The nodes of a trie, level by level from the root, and the items that end at them.

    Attributes:
        first_child: int32 [nodes + 1], as in :class:`~vllm_trie.extras.items.trie.ItemTrie`.
        tokens: int32 [nodes], -1 for the root.
        terminals: int32 [items], ascending.
        rows: int64 [items], the sorted row of each item.
    """

    first_child: np.ndarray
    tokens: np.ndarray
    terminals: np.ndarray
    rows: np.ndarray


def build_items(
    path: Path,
    batches: Iterable[Batch],
    tokenizer: str | None = None,
    duplicates: Duplicates = "refuse",
) -> ItemsHeader:
    """Write the trie of all items; an older file is replaced once the new one is complete.

    Takes about 16 bytes of memory for each item and token of the longest item.

    Args:
        batches: The items.
        tokenizer: Fingerprint of the tokenizer, for the header.
        duplicates: Refuse two items of the same tokens, or keep the first one.

    Raises:
        ItemsError: There are no items, too many, or duplicates.
    """
    rows, ids, weights = _collected(batches)
    keys = rows.view(f"S{4 * rows.shape[1]}").ravel()
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    is_repeated = np.concatenate([[False], keys[1:] == keys[:-1]])
    if is_repeated.any():
        if duplicates == "refuse":
            raise _duplicate(rows[order], ids, order, int(np.argmax(is_repeated)))
        order = order[~is_repeated]
    levels = _levels(rows[order])
    order = order[levels.rows]
    item_keys = ids.keys()[order]
    by_key = np.argsort(item_keys, kind="stable")
    lengths = (rows[order[[0, -1]]] != 0).sum(axis=1)
    texts = ids.texts or []
    weights = weights[order] if weights[order].any() else weights[:0]
    header = ItemsHeader(
        num_items=len(order),
        num_nodes=len(levels.tokens),
        min_length=int(lengths[0]),
        max_length=int(lengths[1]),
        max_token=int(levels.tokens.max()),
        max_children=int(np.diff(levels.first_child).max()),
        ids="int" if ids.texts is None else "str",
        num_ids=len(texts),
        id_bytes=sum(map(len, texts)),
        weights=bool(len(weights)),
        tokenizer=tokenizer,
    )
    ends = np.cumsum([0, *map(len, texts)], dtype="<i8") if texts else np.empty(0, dtype="<i8")
    body = (
        *(ids.values[order].astype("<i8"), ends, item_keys[by_key].astype("<i8")),
        *(levels.first_child, levels.tokens, levels.terminals, by_key.astype("<i4")),
        *(weights.astype("<f4"), np.frombuffer(b"".join(texts), dtype=np.uint8)),
    )
    FORMAT.write(path, header, body)
    return header


def _collected(batches: Iterable[Batch]) -> tuple[np.ndarray, _Ids, np.ndarray]:
    """Return rows >u4 [items, width], ids and weights float32 [items] of all batches."""
    filled = [batch for batch in batches if len(batch.rows)]
    if not filled:
        raise ItemsError("the catalogue has no items; name files with at least one")
    rows = np.zeros(
        (sum(len(batch.rows) for batch in filled), max(batch.rows.shape[1] for batch in filled)),
        dtype=">u4",
    )
    weights = np.zeros(len(rows), dtype=np.float32)
    kinds = {int if isinstance(b.ids, np.ndarray) else type(b.ids[0]) for b in filled}
    if len(kinds) > 1:
        raise ItemsError("some ids are strings and others integers; use one type for all")
    begin = 0
    for batch in filled:
        end = begin + len(batch.rows)
        rows[begin:end, : batch.rows.shape[1]] = batch.rows
        if batch.weights is not None:
            weights[begin:end] = batch.weights
        begin = end
    if kinds == {str}:
        texts = [str(text).encode() for batch in filled for text in batch.ids]
        return rows, _Ids(np.arange(len(rows)), texts), weights
    values = np.concatenate([np.asarray(batch.ids, dtype=np.int64) for batch in filled])
    return rows, _Ids(values, None), weights


def _duplicate(rows: np.ndarray, ids: _Ids, order: np.ndarray, place: int) -> ItemsError:
    row = rows[place]
    return ItemsError(
        f"the items {ids.name(int(order[place - 1]))} and {ids.name(int(order[place]))} have the "
        f"same tokens {(row[row != 0].astype(int) - 1).tolist()}; remove one of them, or keep the "
        "first of each with --duplicates first"
    )


def _levels(rows: np.ndarray) -> _Levels:
    """Return the trie of sorted rows >u4 [items, width] without duplicates.

    Raises:
        ItemsError: It has too many nodes.
    """
    lengths = (rows != 0).sum(axis=1)
    # A row begins a node where it differs from the row before, here or further left.
    begins = np.zeros(rows.shape, dtype=bool)
    begins[0] = True
    begins[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    begins &= rows != 0
    num_nodes = 1 + int(begins.sum())
    if num_nodes > MAX_NODES:
        raise ItemsError(
            f"the catalogue's trie has {num_nodes} nodes, at most {MAX_NODES} are possible; "
            "divide the catalogue"
        )
    first_child = [np.array([1])]
    tokens, terminals, ended = [np.array([-1])], [], []
    node = np.cumsum(begins[:, 0])  # of each row at this depth; those of the first level begin at 1
    for depth in range(rows.shape[1]):
        is_new, ends = begins[:, depth], lengths == depth + 1
        level_end = int(node[-1]) + 1
        tokens.append(rows[is_new, depth].astype(np.int64) - 1)
        terminals.append(node[ends])
        ended.append(np.flatnonzero(ends))
        if depth + 1 < rows.shape[1]:
            below = begins[:, depth + 1]
            child = level_end - 1 + np.cumsum(below)
            first_child.append((child + 1 - below)[is_new])
            node = child
        else:
            first_child.append(np.full(is_new.sum(), level_end))
    first_child.append(np.array([num_nodes]))
    return _Levels(
        np.concatenate(first_child).astype("<i4"),
        np.concatenate(tokens).astype("<i4"),
        np.concatenate(terminals).astype("<i4"),
        np.concatenate(ended),
    )
