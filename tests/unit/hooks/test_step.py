"""The tree that a step verifies, whatever the scheduler did to the draft."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import token_trees
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.verification.pending_tree import (
    PendingTree,
    scheduled_tree,
    trees_of_step,
)


def check(pending: PendingTree) -> None:
    """The lists that the hot path reads are those of the tree."""
    assert pending.token_ids == pending.tree.token_ids.tolist()
    assert pending.parents == pending.tree.parents.tolist()
    assert np.array_equal(pending.depths, pending.tree.depths())
    assert pending.depths.dtype == np.int64


@given(token_trees(), st.integers(0, 50))
def test_a_draft_that_was_cut_keeps_its_branches(tree: TokenTree, kept: int) -> None:
    stored = PendingTree.of(tree)
    scheduled = tree.token_ids.tolist()[:kept]
    found = scheduled_tree(stored, scheduled)
    check(found)
    assert found.token_ids == scheduled
    assert found.parents == tree.parents.tolist()[:kept]
    check(stored)


@given(st.none() | token_trees(vocab_size=4), st.lists(st.integers(-1, 5), min_size=1, max_size=20))
def test_any_other_list_is_a_chain(tree: TokenTree | None, scheduled: list[int]) -> None:
    stored = None if tree is None else PendingTree.of(tree)
    found = scheduled_tree(stored, scheduled)
    check(found)
    assert found.token_ids == scheduled
    if stored is None or stored.token_ids[: len(scheduled)] != scheduled:
        assert found.tree.is_chain


@given(token_trees(max_nodes=10), token_trees(max_nodes=10))
def test_rows_get_their_own_trees(first: TokenTree, second: TokenTree) -> None:
    stored = {
        "a": PendingTree.of(first),
        "b": PendingTree.of(second),
        "gone": PendingTree.of(first),
    }
    scheduled = {"b": second.token_ids.tolist(), "a": first.token_ids.tolist()}
    trees = trees_of_step(stored, scheduled, {"b": 0, "quiet": 1, "a": 2}, 3)
    assert [t.token_ids for t in trees] == [scheduled["b"], [], scheduled["a"]]
    assert [t.parents for t in trees] == [second.parents.tolist(), [], first.parents.tolist()]


def test_a_drafter_may_use_its_arrays_again() -> None:
    drafted = TokenTree.from_lists([5, 6, 7], [-1, 0, 0], [0.9, 0.5, 0.4])
    stored = PendingTree.of(drafted)
    drafted.token_ids[:] = 0
    drafted.parents[:] = -1
    check(stored)
    assert stored.parents == [-1, 0, 0]
