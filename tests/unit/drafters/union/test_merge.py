"""Several trees in one trie: duplicates once, budgets kept, every part's nodes among them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.union.support import VOCAB, trees
from tests.unit.tree.strategies import paths_of
from vllm_trie.extras.union.merge import Draft, build_tree, edge_probabilities, merge
from vllm_trie.tree import TokenTree

PARTS = st.lists(trees(), min_size=1, max_size=3)


@given(PARTS)
def test_each_prefix_once_and_said_by_its_parts(parts):
    merged = merge(dict(enumerate(parts)))
    trie = TokenTree.from_lists(merged.token_ids, merged.parents)
    trie.validate(VOCAB, 1000)
    of_trie = paths_of(trie)
    assert len(set(of_trie)) == len(of_trie)
    assert set(of_trie) == set().union(*map(paths_of, parts))
    for path, edges in zip(of_trie, merged.edges, strict=True):
        assert set(edges) == {i for i, part in enumerate(parts) if path in paths_of(part)}
    for i, part in enumerate(parts):
        for path, edge in zip(paths_of(part), edge_probabilities(part), strict=True):
            assert merged.edges[of_trie.index(path)][i] == pytest.approx(edge)


@given(PARTS, st.lists(st.integers(0, 2), max_size=5))
def test_the_true_path_is_the_longest_prefix(parts, text):
    merged = merge(dict(enumerate(parts)))
    all_paths = set().union(*map(paths_of, parts))
    expected = 0
    while expected < len(text) and tuple(text[: expected + 1]) in all_paths:
        expected += 1
    path = merged.true_path(text)
    assert [merged.token_ids[node] for node in path] == text[:expected]


@given(PARTS, st.integers(1, 12), st.data())
def test_the_tree_keeps_the_budget_and_the_likeliest(parts, budget, data):
    merged = merge(dict(enumerate(parts)))
    edges = data.draw(
        st.lists(st.floats(0.01, 0.99), min_size=merged.num_nodes, max_size=merged.num_nodes)
    )
    probabilities: list[float] = []
    for parent, edge in zip(merged.parents, edges, strict=True):
        probabilities.append(edge * (probabilities[parent] if parent >= 0 else 1.0))
    draft = Draft(merged, probabilities, range(len(parts)), budget, 10)
    tree = build_tree(draft)
    tree.validate(VOCAB, budget)
    assert tree.num_nodes == min(budget, merged.num_nodes)
    if tree.num_nodes:
        best = sorted(probabilities, reverse=True)[: tree.num_nodes]
        assert sorted(tree.probabilities.tolist(), reverse=True) == pytest.approx(best)
    for path, mask in zip(paths_of(tree), draft.parts_of(tree), strict=True):
        proposing = [i for i, part in enumerate(parts) if path in paths_of(part)]
        assert mask == sum(1 << part for part in proposing) > 0
    assert build_tree(draft, chain_only=True).is_chain


def test_parts_without_probabilities_expect_less_of_each_sibling():
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, -1, 0, -1])
    assert edge_probabilities(tree) == [0.5, 0.25, 0.5, 0.125]
