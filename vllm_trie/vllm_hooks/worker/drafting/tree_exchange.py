"""One tree per request on all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

_FIELDS = 3  # token, parent, flag


def pack(trees: Sequence[TokenTree]) -> np.ndarray:
    """Return int32 [len(trees) + 3 * nodes]: the node counts, then tokens, parents and flags."""
    counts = np.array([tree.num_nodes for tree in trees], dtype=np.int32)
    tokens = [tree.token_ids for tree in trees]
    parents = [tree.parents for tree in trees]
    flags = [
        np.zeros(tree.num_nodes, dtype=np.int32) if tree.never_accept is None else tree.never_accept
        for tree in trees
    ]
    return np.concatenate([counts, *tokens, *parents, *flags]).astype(np.int32, copy=False)


def unpack(packed: np.ndarray, num_trees: int) -> list[TokenTree]:
    """Return the trees that :func:`pack` packed, without their probabilities."""
    counts = packed[:num_trees]
    tokens, parents, flags = packed[num_trees:].reshape(_FIELDS, -1)
    trees = []
    start = 0
    for count in counts.tolist():
        nodes = slice(start, start + count)
        never = flags[nodes].astype(bool)
        trees.append(TokenTree(tokens[nodes], parents[nodes], None, never if never.any() else None))
        start += count
    return trees


def same_on_all_ranks(trees: list[TokenTree], group: GroupCoordinator) -> list[TokenTree]:
    """Return rank 0's trees, on every tensor-parallel rank.

    Drafters are deterministic, so ranks agree by themselves; but a time-out or a fault can hit one
    rank alone, and ranks that verify different trees would write wrong KV without noticing. The
    ranks call it together with the same number of trees.
    """
    if group.world_size == 1 or not trees:
        return trees
    source = group.ranks[0]
    packed = pack(trees) if group.rank_in_group == 0 else None
    size = torch.tensor([0 if packed is None else len(packed)])
    torch.distributed.broadcast(size, source, group.cpu_group)
    buffer = (
        torch.empty(int(size), dtype=torch.int32) if packed is None else torch.from_numpy(packed)
    )
    torch.distributed.broadcast(buffer, source, group.cpu_group)
    return trees if group.rank_in_group == 0 else unpack(buffer.numpy(), len(trees))
