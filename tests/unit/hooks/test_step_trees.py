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
    rebuilt = scheduled_tree(tree, scheduled)
    assert rebuilt.token_list == rebuilt.token_ids.tolist() == scheduled
    assert rebuilt.parent_list == rebuilt.parents.tolist() == tree.parents.tolist()[:kept]
    assert rebuilt.depths().tolist() == tree.depths().tolist()[:kept]


@given(st.none() | token_trees(vocab_size=4), st.lists(st.integers(-1, 5), min_size=1, max_size=20))
def test_any_other_list_is_a_chain(tree: TokenTree | None, scheduled: list[int]) -> None:
    rebuilt = scheduled_tree(tree, scheduled)
    assert rebuilt.token_list == rebuilt.token_ids.tolist() == scheduled
    if tree is None or tree.token_list[: len(scheduled)] != scheduled:
        assert rebuilt.is_chain
