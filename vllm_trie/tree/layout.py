"""Order of the nodes of a tree: depth-first with the likeliest child first."""

from __future__ import annotations

import numpy as np

from vllm_trie.tree.token_tree import TokenTree


def depth_first_order(tree: TokenTree) -> np.ndarray:
    """int32 [N], old indices in the new order; siblings by probability, ties by old index.

    A tree without probabilities keeps the given order of siblings.
    """
    children: list[list[int]] = [[] for _ in range(tree.num_nodes + 1)]
    for node, parent in enumerate(tree.parents.tolist()):
        children[parent].append(node)  # the root's list is the last one, index -1
    if tree.probabilities is not None:
        probabilities = tree.probabilities.tolist()
        for siblings in children:
            if len(siblings) > 1:
                siblings.sort(key=lambda node: -probabilities[node])
    order: list[int] = []
    stack = children[-1][::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    return np.array(order, dtype=np.int32)


def depth_first_layout(tree: TokenTree) -> TokenTree:
    """The same tree with its nodes in depth-first order, likeliest child first.

    The likeliest path then occupies the first slots, so accepting it moves no KV, and any prefix
    of the node list is a valid tree. Stable and deterministic; returns `tree` itself if it is laid
    out that way already.
    """
    order = depth_first_order(tree)
    if (order[1:] > order[:-1]).all():
        return tree
    new_index = np.empty(tree.num_nodes + 1, dtype=np.int32)
    new_index[order] = np.arange(tree.num_nodes, dtype=np.int32)
    new_index[-1] = -1
    return TokenTree(
        tree.token_ids[order],
        new_index[tree.parents[order]],
        None if tree.probabilities is None else tree.probabilities[order],
        None if tree.never_accept is None else tree.never_accept[order],
    )


def is_prefix(prefix: TokenTree, tree: TokenTree) -> bool:
    """Whether the first nodes of `tree` are those of `prefix`, in the same order."""
    size = prefix.num_nodes
    return prefix is tree or (
        np.array_equal(prefix.token_ids, tree.token_ids[:size])
        and np.array_equal(prefix.parents, tree.parents[:size])
    )
