"""The tree that a step verifies, whatever the scheduler did to the draft."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import token_trees
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.verification.placement import scheduled_tree


@given(token_trees(), st.integers(0, 50))
def test_a_draft_that_was_cut_keeps_its_branches(tree: TokenTree, kept: int) -> None:
    scheduled = tree.token_ids.tolist()[:kept]
    found = scheduled_tree(tree, scheduled)
    assert found.token_list == found.token_ids.tolist() == scheduled
    assert found.parent_list == found.parents.tolist() == tree.parents.tolist()[:kept]
    assert found.depths().tolist() == tree.depths().tolist()[:kept]


@given(st.none() | token_trees(vocab_size=4), st.lists(st.integers(-1, 5), min_size=1, max_size=20))
def test_any_other_list_is_a_chain(tree: TokenTree | None, scheduled: list[int]) -> None:
    found = scheduled_tree(tree, scheduled)
    assert found.token_list == found.token_ids.tolist() == scheduled
    if tree is None or tree.token_list[: len(scheduled)] != scheduled:
        assert found.is_chain
