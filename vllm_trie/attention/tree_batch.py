"""The query tokens of a step that belong to trees, and the KV slots that each of them sees.

The scheduled tokens of a request with a draft tree, in the order of the flat batch::

    query tokens [ p_0 ... p_m | n_0 n_1 ... n_{N-1} ]
                   committed     tree nodes, depth-first
    KV slots     [0, prefix) earlier tokens | p_0 ... p_m | n_0 ... n_{N-1}

The p's are tokens that are committed but not computed yet, usually only the last sampled one. They
are causal. Node i sees every committed token, its ancestors and itself, and no other node.
Slots are flat: node i lies ``i + 1`` slots behind the last p, whatever its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from vllm_trie.attention.kind import FULL_ATTENTION, AttentionKind
from vllm_trie.tree import words_per_node

NO_NODES = np.empty((0, 0), dtype=np.uint64)
"""Ancestor words of a row without nodes."""


class TreeRow(NamedTuple):
    """One request of the batch that has a tree in this step, or neighbours that share a prefix."""

    batch_index: int
    """Index of the request in the batch, and so in the block table."""
    query_start: int
    """First query token of the request in the flat batch."""
    num_queries: int
    """Scheduled tokens: committed ones and nodes."""
    num_nodes: int
    """N; the last N query tokens are nodes."""
    seq_len: int
    """KV slots in use, the nodes' own included."""
    num_shared: int = 0
    """Above 0: the row stands for ``num_queries`` neighbours in the batch, the first of them at
    ``batch_index``, with one query token each, equal lengths and no nodes. The first ``num_shared``
    slots of all of them hold the same, and are read from the blocks of the first."""


@dataclass(frozen=True)
class TreeBatch:
    """Trees of one step, shared by all layers. Kernels read the arrays.

    Attributes:
        row_array: int64 [num_rows, 6], the fields of the :class:`TreeRow` of each request with a
            tree, in batch order.
        word_array: uint64, the ancestor words of all requests, one after another.
        covers_batch: Every scheduled token of the step belongs to one of these requests, so the
            stock kernel has nothing to do.
    """

    row_array: np.ndarray
    word_array: np.ndarray
    covers_batch: bool

    @cached_property
    def rows(self) -> list[TreeRow]:
        """`row_array` for loops in Python."""
        return [TreeRow(*row) for row in self.row_array.tolist()]

    @cached_property
    def ancestor_words(self) -> list[np.ndarray]:
        """uint64 [N, ceil(N / 64)] per request, :meth:`vllm_trie.tree.TokenTree.ancestor_words`."""
        sizes = [row.num_nodes for row in self.rows]
        ends = accumulate(self.num_words.tolist(), initial=0)
        return [
            self.word_array[start:end].reshape(size, words_per_node(size))
            for (start, end), size in zip(pairwise(ends), sizes, strict=True)
        ]

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64, how far the position of each node of all requests is behind the first one that is
        not committed: its depth less one."""
        counts = words_per_node(np.repeat(self.row_array[:, 3], self.row_array[:, 3]))
        bits = np.unpackbits(self.word_array.view(np.uint8)).reshape(-1, 64)
        ends = np.cumsum(bits.sum(axis=1, dtype=np.int64))[np.cumsum(counts) - 1]
        return np.diff(ends, prepend=0) - 1

    @property
    def num_words(self) -> np.ndarray:
        """int64 [num_rows], the ancestor words of each request."""
        sizes = self.row_array[:, 3]
        counts: np.ndarray = sizes * words_per_node(sizes)
        return counts


def slot_mask(
    ancestor_words: np.ndarray,
    num_queries: int,
    seq_len: int,
    kind: AttentionKind = FULL_ATTENTION,
) -> np.ndarray:
    """Return bool [num_queries, seq_len]: the KV slots of a request that each query token sees."""
    mask = np.ones((num_queries, seq_len), dtype=bool)
    mask[:, seq_len - num_queries :] = query_mask(ancestor_words, num_queries)
    if kind.is_partial:
        committed = seq_len - len(ancestor_words)
        positions = np.arange(seq_len)
        positions[committed:] = mask[num_queries - len(ancestor_words) :].sum(axis=1) - 1
        of_queries = positions[seq_len - num_queries :, None]
        if kind.window:
            mask &= positions > of_queries - kind.window
        if kind.chunk:
            mask &= positions // kind.chunk == of_queries // kind.chunk
    return mask


def query_mask(ancestor_words: np.ndarray, num_queries: int) -> np.ndarray:
    """Return bool [num_queries, num_queries]: the scheduled tokens that each of them sees.

    Args:
        ancestor_words: uint64 [N, ceil(N / 64)], N <= num_queries.
        num_queries: Committed tokens of the step and nodes.
    """
    num_nodes = len(ancestor_words)
    committed = num_queries - num_nodes
    mask = np.zeros((num_queries, num_queries), dtype=bool)
    mask[:committed, :committed] = np.tri(committed, dtype=bool)
    mask[committed:, :committed] = True
    if num_nodes:
        little_endian = ancestor_words.astype("<u8", copy=False).view(np.uint8)
        bits = np.unpackbits(little_endian, axis=1, bitorder="little", count=num_nodes)
        mask[committed:, committed:] = bits
    return mask


def build_tree_batch(
    rows: Sequence[TreeRow], ancestor_words: Sequence[np.ndarray], num_tokens: int
) -> TreeBatch:
    """Describe one step of `num_tokens` scheduled tokens, those of other requests included; see
    :class:`TreeBatch`."""
    row_array = np.array(rows, dtype=np.int64).reshape(-1, len(TreeRow._fields))
    words = [np.empty(0, dtype=np.uint64), *(one.reshape(-1) for one in ancestor_words)]
    return TreeBatch(row_array, np.concatenate(words), row_array[:, 2].sum() == num_tokens)
