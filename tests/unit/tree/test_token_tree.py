from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import VOCAB, WRONG_TREES, paths_of, token_trees
from vllm_trie.tree import MalformedTreeError, TokenTree


@given(token_trees())
def test_generated_trees_are_valid_and_so_is_every_prefix(tree):
    for size in range(tree.num_nodes + 1):
        part = tree.prefix(size)
        part.validate(VOCAB, max_nodes=size)
        assert paths_of(part) == paths_of(tree)[:size]
    assert tree.prefix(tree.num_nodes + 5).num_nodes == tree.num_nodes


@given(token_trees(), st.data())
def test_the_path_that_spells_tokens(tree, data):
    paths = paths_of(tree)
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
    tokens = [*data.draw(st.sampled_from([(), *paths])), *tokens]
    nodes = tree.path_of(tokens)
    assert [paths[node] for node in nodes] == [tuple(tokens[: i + 1]) for i in range(len(nodes))]
    assert len(nodes) == len(tokens) or tuple(tokens[: len(nodes) + 1]) not in paths
    if nodes:
        barred = replace(tree, never_accept=np.arange(tree.num_nodes) == nodes[-1])
        assert barred.path_of(tokens) == nodes[:-1]


@given(token_trees(), st.integers(0, 50))
def test_fillers_are_below_the_last_node(tree, size):
    filled = tree.filled_up(size)
    filled.validate(VOCAB, max_nodes=max(size, tree.num_nodes))
    assert paths_of(filled)[: tree.num_nodes] == paths_of(tree)
    assert filled.num_nodes == max(size, tree.num_nodes)
    assert filled.is_chain == tree.is_chain
    if size > tree.num_nodes:
        assert not filled.ancestor_mask()[: tree.num_nodes, tree.num_nodes :].any()


@given(token_trees(max_nodes=150))
def test_ancestor_words_equal_the_readable_mask(tree):
    words = tree.ancestor_words()
    assert words.dtype == np.uint64
    assert words.shape == (tree.num_nodes, -(-tree.num_nodes // 64))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : tree.num_nodes]
    np.testing.assert_array_equal(bits.astype(bool), tree.ancestor_mask())


@given(token_trees())
def test_depths_and_ancestors_are_those_of_paths(tree):
    paths = paths_of(tree)
    assert tree.depths().dtype == np.int32
    assert tree.depths().tolist() == [*map(len, paths)]
    mask = tree.ancestor_mask()
    for row, path in enumerate(paths):
        for column, other in enumerate(paths):
            assert mask[row, column] == (path[: len(other)] == other)


@given(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), max_size=8), st.integers(0, 30))
def test_from_paths_holds_each_distinct_prefix_once(sequences, max_nodes):
    tree = TokenTree.from_paths(sequences, max_nodes)
    tree.validate(VOCAB, max_nodes)
    prefixes = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)
    assert set(paths) <= prefixes
    assert len(paths) == min(max_nodes, len(prefixes))


@given(token_trees())
def test_chain_is_the_leading_first_child_path(tree):
    chain = tree.chain()
    assert chain.is_chain
    paths = paths_of(tree)
    assert paths_of(chain) == paths[: chain.num_nodes]
    if chain.num_nodes < tree.num_nodes:
        assert tree.parents[chain.num_nodes] != chain.num_nodes - 1


def test_chain_stops_before_nodes_that_are_never_accepted():
    tree = TokenTree.from_lists([1, 2, 3], [-1, 0, 1])
    assert replace(tree, never_accept=np.array([False, True, False])).chain().num_nodes == 1


@pytest.mark.parametrize(("tokens", "parents", "probabilities", "message"), WRONG_TREES)
def test_validation_names_what_is_wrong(tokens, parents, probabilities, message):
    tree = TokenTree.from_lists(tokens, parents, probabilities)
    with pytest.raises(MalformedTreeError, match=message):
        tree.validate(VOCAB, max_nodes=3)


def test_validation_counts_nodes():
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1] * 4)
    with pytest.raises(MalformedTreeError, match="4 nodes, at most 3"):
        tree.validate(VOCAB, max_nodes=3)


def test_validation_checks_dtypes():
    good = TokenTree.from_lists([1], [-1], [0.5])
    for name, value in [
        ("token_ids", np.array([1], dtype=np.int64)),
        ("parents", np.array([-1.0])),
        ("probabilities", np.array([0.5], dtype=np.float64)),
        ("never_accept", np.array([0], dtype=np.int32)),
        ("parents", [-1]),
    ]:
        with pytest.raises(MalformedTreeError, match=f"{name} is .*, it must be a"):
            replace(good, **{name: value}).validate(VOCAB, max_nodes=3)


def test_only_nodes_that_may_be_accepted_need_distinct_siblings():
    tree = TokenTree.from_lists([1, 1, 1], [-1, -1, -1])
    first_and_last = np.array([True, False, True])
    replace(tree, never_accept=first_and_last).validate(vocab_size=10, max_nodes=3)
    with pytest.raises(MalformedTreeError, match="node 2 repeats token 1 under parent -1"):
        replace(tree, never_accept=~first_and_last).validate(vocab_size=10, max_nodes=3)


def test_a_copy_does_not_follow_its_original():
    tree = TokenTree.from_lists([5, 6, 7], [-1, 0, 0], [0.9, 0.5, 0.4])
    tree = replace(tree, never_accept=np.ones(3, dtype=bool))
    copy = tree.copy()
    for array in vars(tree).values():
        array[:] = 0
    assert copy.token_list == [5, 6, 7]
    assert copy.parent_list == [-1, 0, 0]
    assert copy.probabilities.tolist() == pytest.approx([0.9, 0.5, 0.4])
    assert copy.never_accept.all()
