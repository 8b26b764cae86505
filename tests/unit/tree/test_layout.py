from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given

from tests.unit.tree.strategies import paths_of, token_trees
from vllm_trie.tree import TokenTree, depth_first_layout, depth_first_order


@given(token_trees())
def test_layout_is_the_same_tree(tree):
    laid_out = depth_first_layout(tree)
    order = depth_first_order(tree)
    assert sorted(order.tolist()) == list(range(tree.num_nodes))
    before, after = paths_of(tree), paths_of(laid_out)
    assert after == [before[old] for old in order]
    if tree.probabilities is not None:
        assert laid_out.probabilities is not None
        np.testing.assert_array_equal(laid_out.probabilities, tree.probabilities[order])


@given(token_trees())
def test_layout_is_depth_first_and_likeliest_first_and_breaks_ties_by_index(tree):
    laid_out = depth_first_layout(tree)
    assert depth_first_layout(laid_out) is laid_out
    depths, order = laid_out.depths(), depth_first_order(tree).tolist()
    likely = np.zeros(tree.num_nodes) if tree.probabilities is None else tree.probabilities
    last_sibling: dict[int, tuple[float, int]] = {}
    for node, parent in enumerate(laid_out.parents.tolist()):
        # Depth-first: everything between a parent and its child lies below the parent.
        assert (depths[max(parent, 0) + 1 : node] > (depths[parent] if parent >= 0 else 0)).all()
        rank = -float(likely[order[node]]), order[node]
        assert last_sibling.get(parent, (-1.0, -1)) < rank
        last_sibling[parent] = rank


def test_flags_travel_with_their_nodes():
    tree = TokenTree.from_lists([1, 2], [-1, -1], [0.1, 0.2])
    tree = dataclasses.replace(tree, never_accept=np.array([True, False]))
    assert depth_first_layout(tree).never_accept.tolist() == [False, True]
