"""Which query rows of a step belong to trees, and what each of them may attend to.

The scheduled tokens of a request with a draft tree are, in the order of the flat batch::

    query rows   [ p_0 ... p_m | n_0 n_1 ... n_{N-1} ]
                   committed     tree nodes, depth-first
    KV slots     [0, prefix) earlier tokens | p_0 ... p_m | n_0 ... n_{N-1}

The p's are tokens that are committed but not computed yet, usually only the last sampled one. They
are causal. Node i sees every committed token, itself and its ancestors, never its other neighbours.
Slots are flat: node i lies ``i + 1`` slots behind the last p, whatever its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch


class TreeRow(NamedTuple):
    """One request of the batch that has a tree in this step."""

    batch_index: int
    """Row of the request in the batch, and so in the block table."""
    query_start: int
    """First query row of the request in the flat batch."""
    num_queries: int
    """Scheduled tokens: committed ones and nodes."""
    num_nodes: int
    """N, the last N of the query rows are nodes."""
    seq_len: int
    """KV slots in use, the nodes' own included."""


class PackedTrees(NamedTuple):
    """A batch of trees in two contiguous arrays."""

    rows: np.ndarray
    """int64 [num_rows, 5], the fields of :class:`TreeRow`."""
    words: np.ndarray
    """uint64, the ancestor words of all rows, one after another."""


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Trees of one step, shared by all layers.

    Attributes:
        rows: requests with trees, in batch order.
        ancestor_words: one uint64 array [N, ceil(N / 64)] per row, see
            :meth:`vllm_trie.tree.TokenTree.ancestor_words`.
        covers_batch: every scheduled token of the step belongs to one of the rows, so that the
            stock kernel has nothing to do.
    """

    rows: tuple[TreeRow, ...]
    ancestor_words: tuple[np.ndarray, ...]
    covers_batch: bool
    _masks: list[torch.Tensor] = field(default_factory=list, repr=False)
    _packed: list[PackedTrees] = field(default_factory=list, repr=False)

    def masks(self) -> list[torch.Tensor]:
        """bool [num_queries, seq_len] per row: the KV slots that each query row sees.

        Built at the first call, for kernels that want masks instead of ancestor words.
        """
        if not self._masks:
            for row, words in zip(self.rows, self.ancestor_words, strict=True):
                mask = np.ones((row.num_queries, row.seq_len), dtype=bool)
                mask[:, row.seq_len - row.num_queries :] = query_mask(words, row.num_queries)
                self._masks.append(torch.from_numpy(mask))
        return self._masks

    def key_positions(self, index: int) -> np.ndarray:
        """int64 [seq_len]: where the tokens of row `index` stand in its text, the first level of
        the tree at 0 and what is committed before it."""
        row, words = self.rows[index], self.ancestor_words[index]
        positions = np.arange(row.seq_len, dtype=np.int64) - (row.seq_len - row.num_nodes)
        if row.num_nodes:
            bits = np.unpackbits(words.view(np.uint8).reshape(row.num_nodes, -1), axis=1)
            positions[-row.num_nodes :] = bits.sum(axis=1, dtype=np.int64) - 1
        return positions

    def packed(self) -> PackedTrees:
        """The batch as two arrays, built at the first call, for native kernels."""
        if not self._packed:
            words = [each.reshape(-1) for each in self.ancestor_words]
            self._packed.append(
                PackedTrees(
                    np.array(self.rows, dtype=np.int64).reshape(-1, len(TreeRow._fields)),
                    np.concatenate(words) if words else np.empty(0, dtype=np.uint64),
                )
            )
        return self._packed[0]


def query_mask(ancestor_words: np.ndarray, num_queries: int) -> np.ndarray:
    """bool [num_queries, num_queries]: which of a request's scheduled tokens each of them sees.

    Args:
        ancestor_words: uint64 [N, ceil(N / 64)], N <= num_queries.
        num_queries: committed tokens of the step and nodes.
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
    """Describe one step.

    Args:
        rows: requests with trees.
        ancestor_words: uint64 [N, ceil(N / 64)] for each of them.
        num_tokens: scheduled tokens of the whole step, other requests included.
    """
    covered = sum(row.num_queries for row in rows)
    return TreeBatch(tuple(rows), tuple(ancestor_words), covered == num_tokens)
