"""Evaluations against a brute-force oracle: build the other tree, and see what it accepts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.union.support import trees
from vllm_trie.drafters.union.evaluation import evaluate
from vllm_trie.drafters.union.merge import Draft, MergedTrie, merge


def _accepted(
    merged: MergedTrie, probabilities: list[float], room: int, text: list[int], without: int | None
) -> int:
    """Accepted tokens of the tree of the `room` likeliest nodes, all of `without`'s own removed."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(merged.token_ids, merged.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    nodes = [n for n in range(merged.num_nodes) if set(merged.edges[n]) != {without}]
    nodes.sort(key=lambda node: -probabilities[node])
    tree = {paths[node] for node in nodes[: max(room, 0)]}
    length = 0
    while length < len(text) and tuple(text[: length + 1]) in tree:
        length += 1
    return length


@given(st.data())
def test_evaluations(data: st.DataObject) -> None:
    parts = data.draw(st.lists(trees(), min_size=1, max_size=3))
    merged = merge(dict(enumerate(parts)))
    edges = data.draw(
        st.lists(
            st.floats(0.01, 0.99), min_size=merged.num_nodes, max_size=merged.num_nodes, unique=True
        )
    )
    probabilities: list[float] = []
    for parent, edge in zip(merged.parents, edges, strict=True):
        probabilities.append(edge * (probabilities[parent] if parent >= 0 else 1.0))
    budget = data.draw(st.integers(0, 12))
    text = data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    gains = evaluate(Draft(merged, probabilities, range(len(parts)), budget, 10), text)

    with_all = _accepted(merged, probabilities, budget, text, None)
    assert gains == {
        part: with_all - _accepted(merged, probabilities, budget, text, part)
        for part in range(len(parts))
    }


@given(trees(), st.integers(0, 12))
def test_the_selection_is_a_tree(tree, budget: int) -> None:
    merged = merge({0: tree})
    probabilities = [] if tree.probabilities is None else tree.probabilities.tolist()
    selected = set(Draft(merged, probabilities, [0], budget, 1).selected())
    assert len(selected) == min(budget, merged.num_nodes)
    assert all(merged.parents[node] in {-1, *selected} for node in selected)
