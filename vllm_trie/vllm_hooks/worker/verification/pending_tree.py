"""One step's draft trees, row by row of the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.tree import TokenTree

TREE_ATTRIBUTE = "draft_trees"
"""Attribute of the attention metadata that carries the step's
:class:`~vllm_trie.attention.TreeBatch` to the attention backend."""


def tree_arrays(tree: TokenTree) -> tuple[np.ndarray | None, ...]:
    """The arrays of a tree in the order of its constructor."""
    return tree.token_ids, tree.parents, tree.probabilities, tree.never_accept


class PendingTree(NamedTuple):
    """A tree that was proposed for a request, with the lists that the hot path reads."""

    tree: TokenTree
    token_ids: list[int]
    parents: list[int]
    depths: np.ndarray
    """int64 [N]."""

    @classmethod
    def of(cls, tree: TokenTree) -> PendingTree:
        """Of a copy of the tree: a drafter may use its arrays again."""
        kept = TokenTree(*(None if a is None else a.copy() for a in tree_arrays(tree)))
        return cls(
            kept, kept.token_ids.tolist(), kept.parents.tolist(), kept.depths().astype(np.int64)
        )

    def prefix(self, num_nodes: int) -> PendingTree:
        """The first nodes, as the scheduler may cut a draft."""
        if num_nodes >= len(self.token_ids):
            return self
        return PendingTree(
            self.tree.prefix(num_nodes),
            self.token_ids[:num_nodes],
            self.parents[:num_nodes],
            self.depths[:num_nodes],
        )


EMPTY_TREE = PendingTree.of(TokenTree.empty())


def scheduled_tree(stored: PendingTree | None, scheduled: Sequence[int]) -> PendingTree:
    """The tree that the scheduled draft tokens stand for.

    vLLM's scheduler carries a flat list of tokens and may cut it or fill it with placeholders (-1),
    so the list is compared with the tree that was proposed. Anything that is not a prefix of it is
    verified as a chain, which is right for any list of tokens.
    """
    num_nodes = len(scheduled)
    if stored is not None and stored.token_ids[:num_nodes] == scheduled:
        return stored.prefix(num_nodes)
    return PendingTree.of(TokenTree.from_lists(list(scheduled), range(-1, num_nodes - 1)))


def trees_of_step(
    stored: Mapping[str, PendingTree],
    scheduled: Mapping[str, Sequence[int]],
    row_of: Mapping[str, int],
    num_requests: int,
) -> list[PendingTree]:
    """The tree of each batch row; rows without a draft get an empty one.

    Args:
        stored: proposed trees by request id.
        scheduled: draft tokens by request id, as the scheduler sends them.
        row_of: batch row of each request id.
        num_requests: rows in the batch.
    """
    trees = [EMPTY_TREE] * num_requests
    for request_id, token_ids in scheduled.items():
        trees[row_of[request_id]] = scheduled_tree(stored.get(request_id), token_ids)
    return trees
