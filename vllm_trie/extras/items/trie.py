"""A catalogue of items as a trie: which tokens may follow, and which item a path is.

Nodes are numbered level by level from the root, node 0; within a level by their paths. The children
of a node are therefore consecutive, in the order of their tokens::

    first_child   int32 [nodes + 1]   children of node i: first_child[i] .. first_child[i + 1]
    tokens        int32 [nodes]       last token of the path to each node; -1 for the root
    terminals     int32 [items]       nodes at which an item ends, ascending
    values        int64 [items]       id of each item, or the place of its text among the ids
    id_keys       int64 [items]       ascending: ids, or checksums of their texts
    id_order      int32 [items]       the items in the order of their keys
    weights       float32 [items]     weight of each item, if they have some

An item may be the beginning of another: its node then has children. A leaf always ends an item.

References: compressed sparse rows for a trie in recommendation: Su et al., "Vectorizing the Trie:
Efficient Constrained Decoding for LLM-based Generative Retrieval on Accelerators".
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = 0
"""The node of the empty path."""

ItemId = int | str

_CHECK_CHUNK = 1 << 22


class Children(NamedTuple):
    """Children of several nodes, parent by parent.

    Attributes:
        parents: int64 [c], index of the parent among the nodes that were asked for.
        nodes: int32 [c], the children; the tokens of each parent's ascend.
    """

    parents: np.ndarray
    nodes: np.ndarray


class IdTexts(NamedTuple):
    """Ids that are strings: offsets int64 [n + 1] into UTF-8 text uint8[...]."""

    offsets: np.ndarray
    text: np.ndarray


@dataclass(frozen=True, slots=True)
class ItemTrie:
    """A catalogue; the arrays are those of this module's layout and may be read-only.

    Attributes:
        weights: None if all are 0.
        id_texts: Ids that are strings; None if they are integers.
        max_length: Tokens of the longest item.
        version: Identifies the content.
        weight_range: The least and the largest weight.
        memory: Where other processes of the host can open it while this one uses it.
        tokenizer: Fingerprint of its tokenizer; None if none was named.
        path: Its file, or the `memory` that it was opened from.
    """

    first_child: np.ndarray
    tokens: np.ndarray
    terminals: np.ndarray
    values: np.ndarray
    id_keys: np.ndarray
    id_order: np.ndarray
    weights: np.ndarray | None
    id_texts: IdTexts | None
    max_length: int
    version: str = ""
    weight_range: tuple[float, float] = (0.0, 0.0)
    memory: str = ""
    tokenizer: str | None = None
    path: Path = Path()

    @property
    def num_items(self) -> int:
        return len(self.terminals)

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    def children(self, nodes: np.ndarray) -> Children:
        """Return the children of int [n] nodes."""
        starts = self.first_child[nodes].astype(np.int64)
        counts = self.first_child[np.asarray(nodes) + 1] - starts
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        parents = np.repeat(np.arange(len(starts)), counts)
        nodes_below = np.arange(total) + np.repeat(starts - (ends - counts), counts)
        return Children(parents, nodes_below.astype(np.int32))

    def has_children(self, nodes: np.ndarray) -> np.ndarray:
        """Return bool[...], whether items go on after int[...] nodes."""
        nodes = np.asarray(nodes)
        return np.asarray(self.first_child[nodes + 1] > self.first_child[nodes])

    def is_terminal(self, nodes: np.ndarray) -> np.ndarray:
        """Return bool[...], whether an item ends at int[...] nodes."""
        nodes = np.asarray(nodes)
        # A leaf ends an item; only nodes with children need a look, from the first that ends one.
        result = ~self.has_children(nodes)
        is_inner = ~result & (nodes >= self.terminals[0])
        inner = nodes[is_inner]
        result[is_inner] = self.terminals[self._indices(inner)] == inner
        return result

    def item_ids(self, nodes: np.ndarray) -> list[ItemId]:
        """Return the ids of the items that end at int [n] nodes.

        Raises:
            ValueError: No item ends at one of them.
        """
        nodes = np.asarray(nodes)
        indices = self._indices(nodes)
        if not np.array_equal(self.terminals[indices], nodes):
            wrong = nodes[self.terminals[indices] != nodes]
            raise ValueError(f"no item ends at node {wrong[0]}")
        return self._ids(self.values[indices])

    def item_weights(self, nodes: np.ndarray) -> np.ndarray:
        """Return float32[...], the weights of the items that end at int[...] nodes."""
        if self.weights is None:
            return np.zeros(np.shape(nodes), dtype=np.float32)
        return np.asarray(self.weights[self._indices(nodes)])

    def find_ids(self, ids: Sequence[ItemId]) -> np.ndarray:
        """Return int32[...], the nodes of all items with one of these ids, ascending."""
        if not ids:
            return np.empty(0, dtype=np.int32)
        keys = np.array(
            [text_key(i.encode()) if isinstance(i, str) else i for i in ids], dtype=np.int64
        )
        begins = np.searchsorted(self.id_keys, keys)
        counts = np.searchsorted(self.id_keys, keys, side="right") - begins
        which = np.repeat(np.arange(len(keys)), counts)
        firsts = np.cumsum(counts) - counts
        numbers = self.id_order[np.arange(len(which)) + (begins - firsts)[which]]
        if self.id_texts is not None:  # different texts may have one key
            texts = self._ids(self.values[numbers])
            same = [text == ids[n] for text, n in zip(texts, which.tolist(), strict=True)]
            numbers = numbers[np.array(same, dtype=bool)]
        return np.unique(self.terminals[numbers])

    def find_all(self, paths: Sequence[Sequence[int]]) -> np.ndarray:
        """Return int32[...], the nodes at the ends of those of the paths that stay in the trie.

        The work depends on the number of paths and on the trie's depth.
        """
        inside = [path for path in paths if len(path) <= self.max_length]
        lengths = np.array([len(path) for path in inside], dtype=np.int64)
        ends = [np.full(int((lengths == 0).sum()), ROOT, dtype=np.int32)]
        remaining = np.flatnonzero(lengths)
        nodes = np.full(len(remaining), ROOT, dtype=np.int32)
        for depth in range(self.max_length):
            tokens = np.array([inside[index][depth] for index in remaining], dtype=np.int64)
            nodes = self._child(nodes, tokens)
            remaining, nodes = remaining[nodes != ROOT], nodes[nodes != ROOT]
            is_end = lengths[remaining] == depth + 1
            ends.append(nodes[is_end])
            remaining, nodes = remaining[~is_end], nodes[~is_end]
        return np.concatenate(ends)

    def _child(self, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return int32 [n], the child of each node with this token; the root if there is none."""
        low, end = self.first_child[nodes], self.first_child[nodes + 1]
        high = end
        while (low < high).any():  # a binary search in all nodes' children at once
            middle = low + (high - low) // 2
            is_less = (low < high) & (self.tokens[np.minimum(middle, end - 1)] < tokens)
            low = np.where(is_less, middle + 1, low)
            high = np.where(is_less, high, np.minimum(high, middle))
        is_child = (low < end) & (self.tokens[np.minimum(low, self.num_nodes - 1)] == tokens)
        return np.where(is_child, low, ROOT).astype(np.int32)

    def parents(self, nodes: np.ndarray) -> np.ndarray:
        """Return int32 [n], the parents of int [n] nodes other than the root."""
        # The last node whose children begin at or before this one.
        sought = np.asarray(nodes, dtype=self.first_child.dtype)
        parents = np.searchsorted(self.first_child, sought, side="right") - 1
        return parents.astype(np.int32)

    def _indices(self, nodes: np.ndarray) -> np.ndarray:
        """Return where in `terminals` each node is, or could be."""
        # With another type, NumPy would convert the whole array.
        sought = np.asarray(nodes, dtype=self.terminals.dtype)
        return np.minimum(np.searchsorted(self.terminals, sought), self.num_items - 1)

    def _ids(self, values: np.ndarray) -> list[ItemId]:
        if self.id_texts is None:
            return list(values.tolist())
        offsets, text = self.id_texts
        return [text[offsets[v] : offsets[v + 1]].tobytes().decode() for v in values.tolist()]


def text_key(text: bytes) -> int:
    """Return the key of an id's UTF-8 text: a checksum, and the length."""
    return zlib.crc32(text) | len(text) << 32


def find_fault(trie: ItemTrie) -> str | None:
    """Return what makes arrays of the right sizes no trie, None if they are one.

    Reads everything once, in chunks.
    """
    first, nodes, items = trie.first_child, trie.num_nodes, trie.num_items
    if nodes < 2 or items < 1 or first[0] != 1 or first[nodes] != nodes or trie.tokens[0] != -1:
        return "the root or the end of its nodes is wrong"
    for begin in range(0, nodes, _CHECK_CHUNK):
        end = min(begin + _CHECK_CHUNK, nodes)
        starts = first[begin : end + 1].astype(np.int64)
        # Children come after their parents, and every node but the root is someone's child.
        numbers = np.arange(begin, end)
        if (np.diff(starts) < 0).any() or (starts[:-1] <= numbers).any() or starts[-1] > nodes:
            return f"the children of nodes {begin} to {end - 1} are out of order"
        tokens = trie.tokens[max(begin, 1) : end]
        if tokens.min() < 0:
            return f"a token of nodes {begin} to {end - 1} is negative"
        leaves = numbers[np.diff(starts) == 0]
        if not np.array_equal(trie.terminals[trie._indices(leaves)], leaves):
            return f"an item ends nowhere among nodes {begin} to {end - 1}"
    start, depth = 1, 0  # first node of a level
    while start < nodes and depth <= trie.max_length:
        start, depth = int(first[start]), depth + 1
    if depth != trie.max_length:
        return f"its longest item does not have {trie.max_length} tokens"
    return _find_sibling_fault(trie) or _find_item_fault(trie)


def _find_sibling_fault(trie: ItemTrie) -> str | None:
    first, nodes = trie.first_child, trie.num_nodes
    for begin in range(1, nodes, _CHECK_CHUNK):
        end = min(begin + _CHECK_CHUNK, nodes)
        tokens = trie.tokens[begin : min(end + 1, nodes)].astype(np.int64)
        # Tokens ascend, except where the children of the next parent begin.
        falls = (np.flatnonzero(np.diff(tokens) <= 0) + begin + 1).astype(first.dtype)
        if not np.array_equal(first[np.minimum(np.searchsorted(first, falls), nodes)], falls):
            return f"the tokens of siblings among nodes {begin} to {end - 1} do not ascend"
    return None


def _find_item_fault(trie: ItemTrie) -> str | None:
    limit = None if trie.id_texts is None else len(trie.id_texts.offsets) - 1
    for begin in range(0, trie.num_items, _CHECK_CHUNK):
        ends = trie.terminals[begin : begin + _CHECK_CHUNK + 1].astype(np.int64)
        if ends.min() < 1 or ends.max() >= trie.num_nodes or (np.diff(ends) <= 0).any():
            return f"items {begin} to {begin + len(ends) - 1} are out of order"
        values = trie.values[begin : begin + _CHECK_CHUNK]
        weights = None if trie.weights is None else trie.weights[begin : begin + _CHECK_CHUNK]
        if weights is not None and not np.isfinite(weights).all():
            return f"the weight of an item of {begin} to {begin + len(values) - 1} is not finite"
        keys = trie.id_keys[begin : begin + _CHECK_CHUNK + 1]
        order = trie.id_order[begin : begin + _CHECK_CHUNK + 1]
        # Ascending pairs are all different, so every item is in the index once.
        rises = (np.diff(keys) > 0) | ((np.diff(keys) == 0) & (np.diff(order) > 0))
        if not rises.all() or order.min() < 0 or order.max() >= trie.num_items:
            return "the index of the ids is out of order"
        if limit is None and not np.array_equal(trie.values[order], keys):
            return "the index of the ids has other ids"
        if limit is not None and (values.min() < 0 or values.max() >= limit):
            return f"an item of {begin} to {begin + len(values) - 1} has no id"
    return None if trie.id_texts is None else _find_text_fault(trie.id_texts)


def _find_text_fault(texts: IdTexts) -> str | None:
    offsets, text = texts
    for begin in range(0, len(offsets) - 1, _CHECK_CHUNK):
        part = offsets[begin : begin + _CHECK_CHUNK + 1]
        if (np.diff(part) < 0).any() or part[0] < 0 or part[-1] > len(text):
            return "the ids are out of order"
        inner = part[part < len(text)]
        try:
            text[part[0] : part[-1]].tobytes().decode()
        except UnicodeDecodeError:
            return "the ids are not UTF-8"
        if ((text[inner] & 0xC0) == 0x80).any():  # of a character that began before
            return "the ids are not UTF-8"
    return None
