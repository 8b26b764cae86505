from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import flags, token_trees
from vllm_trie.tree import accept_greedy


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
