from __future__ import annotations

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


@given(token_trees(with_probabilities=True))
def test_layout_is_depth_first_and_likeliest_first(tree):
    laid_out = depth_first_layout(tree)
    depths = laid_out.depths()
    last_sibling: dict[int, float] = {}
    assert laid_out.probabilities is not None
    for node, parent in enumerate(laid_out.parents.tolist()):
        # Depth-first: everything between a parent and its child lies below the parent.
        assert (depths[max(parent, 0) + 1 : node] > (depths[parent] if parent >= 0 else 0)).all()
        probability = float(laid_out.probabilities[node])
        assert probability <= last_sibling.get(parent, 1.0)
        last_sibling[parent] = probability


@given(token_trees())
def test_layout_is_idempotent_and_breaks_ties_by_index(tree):
    laid_out = depth_first_layout(tree)
    assert depth_first_layout(laid_out) is laid_out
    order = depth_first_order(tree).tolist()
    position = {old: new for new, old in enumerate(order)}
    for first in range(tree.num_nodes):
        for second in range(first + 1, tree.num_nodes):
            tied = (
                tree.probabilities is None
                or tree.probabilities[first] == tree.probabilities[second]
            )
            if tree.parents[first] == tree.parents[second] and tied:
                assert position[first] < position[second]


def test_flags_travel_with_their_nodes():
    tree = TokenTree(
        np.array([1, 2], dtype=np.int32),
        np.array([-1, -1], dtype=np.int32),
        np.array([0.1, 0.2], dtype=np.float32),
        np.array([True, False]),
    )
    laid_out = depth_first_layout(tree)
    assert laid_out.never_accept.tolist() == [False, True]
