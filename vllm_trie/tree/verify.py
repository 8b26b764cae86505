"""Greedy verification: the nodes of a draft tree that the target model accepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_trie.tree.token_tree import ROOT


def accept_greedy(
    tree_token_ids: Sequence[int],
    parents: Sequence[int],
    target: Sequence[int],
    never_accept: Sequence[bool] | np.ndarray | None = None,
) -> list[int]:
    """Return the path of the tree that the target model's own choices follow.

    Args:
        tree_token_ids: N draft tokens (a list: indexing NumPy arrays here is ten times slower).
        parents: N parent indices, parents before children, -1 for the root.
        target: N + 1 tokens; `target[0]` is the target's token after the last committed token and
            `target[i + 1]` its token after node i.
        never_accept: N flags of nodes that must not be accepted, or None.

    Returns:
        The accepted node indices, root first. The step's output tokens are the accepted nodes'
        tokens and then the bonus token `target[last + 1]` (`target[0]` if nothing was accepted).
    """
    accepted: list[int] = []
    node, token = ROOT, target[0]
    # Children follow their parents, so one pass in index order visits every path.
    for child, parent in enumerate(parents):
        if (
            parent == node
            and tree_token_ids[child] == token
            and not (never_accept is not None and never_accept[child])
        ):
            accepted.append(child)
            node = child
            token = target[child + 1]
    return accepted
