"""Several trees in one trie: duplicates once, budgets kept, every part's nodes found again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.union.support import VOCAB, prefixes, trees
from vllm_trie.drafters.union.merge import (
    Draft,
    build_tree,
    edge_probabilities,
    merge,
    window_sizes,
)
from vllm_trie.tree import TokenTree

PARTS = st.lists(trees(), min_size=1, max_size=3)


def _paths(tree: TokenTree) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@given(PARTS)
def test_each_prefix_once_and_said_by_its_parts(parts: list[TokenTree]) -> None:
    merged = merge(dict(enumerate(parts)))
    trie = TokenTree.from_lists(merged.token_ids, merged.parents)
    trie.validate(VOCAB, 1000)
    paths = _paths(trie)
    assert len(set(paths)) == len(paths)
    assert set(paths) == set().union(*map(prefixes, parts))
    for path, edges in zip(paths, merged.edges, strict=True):
        assert set(edges) == {i for i, part in enumerate(parts) if path in prefixes(part)}
    for part, node_of in zip(parts, merged.node_of.values(), strict=True):
        edge = edge_probabilities(part)
        for node, target in enumerate(node_of):
            if target < 0:
                assert part.never_accept is not None
                assert part.never_accept[node]
                continue
            assert paths[target] == _paths(part)[node]
            assert merged.edges[target][parts.index(part)] == pytest.approx(edge[node])


@given(PARTS, st.lists(st.integers(0, 2), max_size=5))
def test_the_true_path_is_the_longest_prefix(parts: list[TokenTree], text: list[int]) -> None:
    merged = merge(dict(enumerate(parts)))
    known = set().union(*map(prefixes, parts))
    expected = 0
    while expected < len(text) and tuple(text[: expected + 1]) in known:
        expected += 1
    path = merged.true_path(text)
    assert [merged.token_ids[node] for node in path] == text[:expected]


@given(PARTS, st.integers(1, 12), st.data())
def test_the_tree_keeps_the_budget_and_the_likeliest(
    parts: list[TokenTree], budget: int, data: st.DataObject
) -> None:
    merged = merge(dict(enumerate(parts)))
    edges = data.draw(
        st.lists(st.floats(0.01, 0.99), min_size=merged.num_nodes, max_size=merged.num_nodes)
    )
    probabilities: list[float] = []
    for parent, edge in zip(merged.parents, edges, strict=True):
        probabilities.append(edge * (probabilities[parent] if parent >= 0 else 1.0))
    overhead, room = {}, budget
    for index, part in enumerate(parts):
        wanted = 0 if part.never_accept is None else int(part.never_accept.sum())
        overhead[index] = wanted if wanted <= room else 0
        room -= overhead[index]
    trees = dict(enumerate(parts))
    assert window_sizes(trees, budget) == overhead
    draft = Draft(merged, probabilities, overhead, budget, 10)
    union = build_tree(draft, trees)
    union.tree.validate(VOCAB, budget)
    never = union.tree.never_accept
    candidates = int((~never).sum()) if never is not None else union.tree.num_nodes
    assert candidates == min(room, merged.num_nodes)
    if candidates:
        best = sorted(probabilities, reverse=True)[:candidates]
        assert union.tree.probabilities is not None
        found = sorted(union.tree.probabilities[:candidates].tolist(), reverse=True)
        assert found == pytest.approx(best)
    for part, node_of in zip(parts, union.node_of.values(), strict=True):
        for node, target in enumerate(node_of):
            if target >= 0:
                assert union.tree.token_ids[target] == part.token_ids[node]
                assert _paths(union.tree)[target] == _paths(part)[node]
    paths = _paths(union.tree)
    for node, mask in enumerate(draft.parts_of(union.tree)):
        if never is not None and never[node]:
            assert mask == sum(1 << part for part, size in overhead.items() if size)
        else:
            proposing = [i for i, part in enumerate(parts) if tuple(paths[node]) in prefixes(part)]
            assert mask == sum(1 << part for part in proposing) > 0
    chain = build_tree(draft, trees, chain_only=True)
    assert chain.tree.never_accept is None
    assert chain.tree.is_chain
    assert all(
        target < chain.tree.num_nodes for nodes in chain.node_of.values() for target in nodes
    )


def test_a_window_shares_nothing_and_comes_last() -> None:
    candidates = TokenTree.from_lists([1, 2], [-1, 0], [0.5, 0.25])
    window = TokenTree(
        np.array([1, 2], dtype=np.int32),
        np.array([-1, 0], dtype=np.int32),
        np.zeros(2, dtype=np.float32),
        np.ones(2, dtype=bool),
    )
    parts = {0: candidates, 1: window}
    union = build_tree(Draft(merge(parts), [0.5, 0.25], {0: 0, 1: 2}, 4, 10), parts)
    assert union.tree.never_accept is not None
    assert union.tree.never_accept.tolist() == [False, False, True, True]
    assert union.tree.token_ids.tolist() == [1, 2, 1, 2]
    assert union.node_of == {0: [0, 1], 1: [2, 3]}


def test_parts_without_probabilities_expect_less_of_each_sibling() -> None:
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, -1, 0, -1])
    assert edge_probabilities(tree) == [0.5, 0.25, 0.5, 0.125]
