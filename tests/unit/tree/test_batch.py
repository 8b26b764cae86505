"""Whole batches of trees in one call, compared with the trees one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import VOCAB, WRONG_TREES, flags, token_trees
from vllm_trie.tree import (
    MalformedTreeError,
    TokenTree,
    accept_all,
    accept_greedy,
    check_all,
    place,
    select_all,
)


def batches(with_probabilities: bool) -> st.SearchStrategy[list[TokenTree]]:
    trees = token_trees(12, VOCAB, with_probabilities)
    return st.lists(
        trees.map(lambda tree: tree if tree.num_nodes else TokenTree.empty()),
        min_size=1,
        max_size=5,
    )


def as_lists(tree: TokenTree) -> list[object]:
    arrays = (tree.token_ids, tree.parents, tree.probabilities, tree.never_accept)
    return [None if array is None else array.tolist() for array in arrays]


def copies(trees: Sequence[TokenTree]) -> list[TokenTree]:
    checked = check_all(trees, VOCAB, copies=True)
    assert checked is not None
    return checked


def rows_of(trees: Sequence[TokenTree]) -> np.ndarray:
    """Return rows of requests with 100 committed tokens, three of them in the step."""
    sizes = [tree.num_nodes for tree in trees]
    return np.array(
        [(i, 10 * i - 3, size + 3, size, 100 + size, 0) for i, size in enumerate(sizes)]
    )


def check(trees: list[TokenTree], data: st.DataObject) -> None:
    """Compare the copies and the walk of a batch with those of its trees."""
    owned = copies(trees)
    assert list(map(as_lists, owned)) == list(map(as_lists, trees))
    for ours, theirs in zip(owned, trees, strict=True):
        assert not np.shares_memory(ours.token_ids, theirs.token_ids)
    if any(tree.num_nodes for tree in trees):
        full = [tree for tree in trees if tree.num_nodes]
        (tokens, shifts), words = place(full, rows_of(full))
        assert tokens.tolist() == [
            10 * i + node for i, t in enumerate(full) for node in range(t.num_nodes)
        ]
        depths = [tree.depths() - 1 - np.arange(tree.num_nodes) for tree in full]
        assert shifts.tolist() == np.concatenate(depths).tolist()
        expected = np.concatenate([tree.ancestor_words().reshape(-1) for tree in full])
        assert words.tolist() == expected.tolist()
    never = [flags(data.draw, tree.num_nodes) for tree in trees]
    walked = [
        TokenTree(tree.token_ids, tree.parents, None, mask if data.draw(st.booleans()) else None)
        for tree, mask in zip(trees, never, strict=True)
    ]
    size = sum(tree.num_nodes + 1 for tree in trees)
    target = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=size, max_size=size))
    outputs, paths = accept_all(walked, np.array(target))
    first = 0
    for tree, output, path in zip(walked, outputs, paths, strict=True):
        sampled = target[first : first + tree.num_nodes + 1]
        first += len(sampled)
        assert path == accept_greedy(tree.token_list, tree.parent_list, sampled, tree.never_accept)
        assert output == [tree.token_list[n] for n in path] + [sampled[path[-1] + 1 if path else 0]]


@given(batches(with_probabilities=True) | batches(with_probabilities=False), st.data())
def test_a_batch_is_worked_on_as_its_trees_are(trees, data):
    check(trees, data)


@pytest.mark.parametrize(
    "tree",
    [
        *(TokenTree.from_lists(*lists) for *lists, _ in WRONG_TREES),
        TokenTree(np.array([1], dtype=np.int64), np.array([-1], dtype=np.int32)),
        replace(TokenTree.from_lists([1], [-1]), probabilities=np.array([0.5])),
        replace(TokenTree.from_lists([1], [-1]), never_accept=np.array([True])),
    ],
)
def test_a_batch_with_a_doubtful_tree_is_looked_at_one_by_one(tree):
    with_probabilities = tree.probabilities is not None
    good = TokenTree.from_lists([3], [-1], [0.5] if with_probabilities else None)
    assert check_all([tree], VOCAB, copies=True) is None
    assert check_all([good, tree], VOCAB, copies=False) is None


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 4),
            st.integers(-2, 3),
            st.sampled_from([-0.1, 0.0, 0.3, 0.5, 1.0, 1.5, float("nan")]),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_a_batch_is_sound_where_its_trees_are(nodes, has_probabilities):
    probabilities = [p for *_, p in nodes] if has_probabilities else None
    tree = TokenTree.from_lists([t for t, *_ in nodes], [p for _, p, _ in nodes], probabilities)
    good = TokenTree.from_lists([3], [-1], [0.5] if has_probabilities else None)
    is_sound = check_all([good, tree, good], 4, copies=False) is not None
    try:
        tree.validate(4, max_nodes=4)
        assert is_sound
    except MalformedTreeError:
        assert not is_sound


def test_arrays_of_two_dimensions_are_looked_at_one_by_one():
    parents = np.array([[-1, 7]], dtype=np.int32)
    tree = TokenTree(np.array([1], dtype=np.int32), parents)
    assert check_all([tree], VOCAB, copies=True) is None


@given(batches(with_probabilities=True), st.data())
def test_the_nodes_that_are_kept_form_the_same_trees(trees, data):
    trees = [tree for tree in trees if tree.num_nodes]
    if not trees:
        return
    never = flags(data.draw, trees[-1].num_nodes)
    trees[-1] = replace(trees[-1], never_accept=never if data.draw(st.booleans()) else None)
    least = data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]))
    keep = [tree.probabilities >= least for tree in trees]
    selected = select_all(trees, np.concatenate(keep))
    for tree, kept, selected_tree in zip(trees, keep, selected, strict=True):
        nodes = np.flatnonzero(kept)
        new_index = {-1: -1} | {int(node): place for place, node in enumerate(nodes)}
        assert selected_tree.token_ids.tolist() == tree.token_ids[nodes].tolist()
        assert selected_tree.parents.tolist() == [
            new_index[p] for p in tree.parents[nodes].tolist()
        ]
        if len(nodes):
            assert selected_tree.probabilities.tolist() == tree.probabilities[nodes].tolist()
            if tree.never_accept is not None:
                assert selected_tree.never_accept.tolist() == tree.never_accept[nodes].tolist()
