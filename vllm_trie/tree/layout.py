"""Node order of a tree: depth-first with the likeliest child first."""

from __future__ import annotations

import numpy as np

from vllm_trie.tree.token_tree import TokenTree


def depth_first_order(tree: TokenTree) -> np.ndarray:
    """Return int32 [N], old indices in depth-first order.

    Siblings are in order of probability; ties, and trees without probabilities, keep their order.
    """
    children = tree.children()
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
    """Return the tree with its nodes in depth-first order, likeliest child first.

    The likeliest path then occupies the first slots, so accepting it moves no KV, and any prefix of
    the node list is a tree. Returns `tree` itself if its nodes are in this order.
    """
    order = depth_first_order(tree)
    if (order[1:] > order[:-1]).all():
        return tree
    new_index = np.empty(tree.num_nodes + 1, dtype=np.int32)
    new_index[order] = np.arange(tree.num_nodes, dtype=np.int32)
    new_index[-1] = -1
    return tree.select(order, new_index[tree.parents[order]])
