from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import flags, paths_of, token_trees
from vllm_trie.tree import accept_greedy, depth_first_layout


def accept_greedy_reference(
    tree_token_ids: Sequence[int],
    parents: Sequence[int],
    target: Sequence[int],
    never_accept: Sequence[bool] | None = None,
) -> list[int]:
    """Return what `accept_greedy` returns; its readable twin, which descends level by level."""
    accepted: list[int] = []
    node = -1
    while True:
        matching = [
            child
            for child, parent in enumerate(parents)
            if parent == node
            and tree_token_ids[child] == target[node + 1]
            and not (never_accept is not None and never_accept[child])
        ]
        if not matching:
            return accepted
        node = matching[0]
        accepted.append(node)


@given(token_trees(vocab_size=3), st.data())
def test_fast_walk_equals_its_readable_twin(tree, data):
    size = tree.num_nodes
    target = data.draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1))
    never = None if data.draw(st.booleans()) else flags(data.draw, size).tolist()
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    accepted = accept_greedy(tokens, parents, target, never)
    assert accepted == accept_greedy_reference(tokens, parents, target, never)
    # What is accepted is a path whose every token is the target's choice at its parent.
    node = -1
    for child in accepted:
        assert parents[child] == node
        assert tokens[child] == target[node + 1]
        assert never is None or not never[child]
        node = child


@given(token_trees(vocab_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=10))
def test_accepts_the_longest_prefix_of_the_continuation_in_any_layout(tree, continuation):
    """A target that recites one text accepts as much of it as the tree has."""
    paths = paths_of(tree)
    best = max((len(p) for p in paths if tuple(continuation[: len(p)]) == p), default=0)
    for version in (tree, depth_first_layout(tree)):
        text = continuation + [2]
        depths = version.depths().tolist()
        target = [text[0]] + [text[min(depth, len(text) - 1)] for depth in depths]
        accepted = accept_greedy(version.token_ids.tolist(), version.parents.tolist(), target)
        tokens = [int(version.token_ids[node]) for node in accepted]
        assert tokens[: len(continuation)] == continuation[: len(tokens)]
        assert min(len(tokens), len(continuation)) >= best
