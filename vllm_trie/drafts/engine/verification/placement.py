"""A step's draft trees and their places in the flat batch: query tokens, positions, logits rows.

The query tokens of a request with a tree, which are also its KV slots in order::

    tokens     [ committed, not computed yet ][ node 0 ][ node 1 ] ... [ node N - 1 ]
    positions  [ flat, set by vLLM           ][ number of committed tokens - 1 + depth ]

The last committed token and each node have a row of logits: ``N + 1`` rows for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.attention import TreeBatch, TreeRow
from vllm_trie.attention.device_copy import to_device
from vllm_trie.tree import TokenTree, place


class QueryTokens(NamedTuple):
    """The flat batch of a step's tokens, prepared as if all drafts were chains."""

    starts: np.ndarray
    """int32 [num_requests + 1], where each request's query tokens start; the last entry is their
    number."""
    num_computed: np.ndarray
    """int [num_requests], tokens of each request whose KV is in the cache."""
    positions: torch.Tensor
    """int64 [num_tokens or more]."""


def scheduled_tree(stored: TokenTree | None, scheduled: Sequence[int]) -> TokenTree:
    """Return the tree that a request's scheduled draft tokens stand for; empty for no tokens.

    vLLM's scheduler carries a flat list of tokens and may cut it. A prefix of the stored tree's
    tokens is that part of the tree. Any other list is verified as a chain, which is right for every
    list of tokens.
    """
    num_nodes = len(scheduled)
    if not num_nodes:
        return TokenTree.empty()
    if stored is not None and stored.token_list[:num_nodes] == scheduled:
        return stored.prefix(num_nodes)
    return TokenTree.from_lists(scheduled, range(-1, num_nodes - 1))


def place_trees(
    trees: Sequence[TokenTree], tokens: QueryTokens, takes_chains: bool
) -> tuple[TreeBatch | None, torch.Tensor | None]:
    """Set the nodes' positions and return the trees that need tree attention, if any does.

    Args:
        trees: Of each request of the batch, empty ones included.
        tokens: The batch; positions are changed.
        takes_chains: Whether chains belong to tree attention too; vLLM's kernel gets them if not.

    Returns:
        The trees, and their nodes' places for :func:`follow_depths`.
    """
    placed = [
        index
        for index, tree in enumerate(trees)
        if tree.num_nodes and (takes_chains or not tree.is_chain)
    ]
    if not placed:
        return None, None
    rows = np.zeros((len(placed), len(TreeRow._fields)), dtype=np.int64)
    rows[:, 0] = placed
    rows[:, 1] = tokens.starts[placed]
    rows[:, 2] = tokens.starts[1:][placed] - rows[:, 1]
    rows[:, 3] = [trees[index].num_nodes for index in placed]
    rows[:, 4] = tokens.num_computed[placed] + rows[:, 2]
    places, words = place([trees[index] for index in placed], rows)
    on_device = to_device(places, tokens.positions.device)
    follow_depths(tokens.positions, on_device)
    return TreeBatch(rows, words, rows[:, 2].sum() == tokens.starts[-1]), on_device


def follow_depths(positions: torch.Tensor, places: torch.Tensor) -> None:
    """Let the positions of nodes, which are those of their slots, follow their depths.

    Args:
        positions: int64 [..., num_tokens or more], changed; text advances in all rows (M-RoPE).
        places: int64 [2, nodes], see :func:`vllm_trie.tree.place`.
    """
    nodes, shifts = places
    positions.index_add_(-1, nodes, shifts.expand(*positions.shape[:-1], -1))
