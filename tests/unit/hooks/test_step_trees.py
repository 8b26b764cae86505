"""The tree that a step verifies, whatever the scheduler did to the draft."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import token_trees
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.verification.step_trees import scheduled_tree, trees_of_step


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


@given(token_trees(max_nodes=10), token_trees(max_nodes=10))
def test_requests_get_their_own_trees(first: TokenTree, second: TokenTree) -> None:
    stored = {"a": first, "b": second, "gone": first}
    scheduled = {"b": second.token_ids.tolist(), "a": first.token_ids.tolist()}
    trees = trees_of_step(stored, scheduled, ["b", "quiet", "a"])
    assert [t.token_list for t in trees] == [scheduled["b"], [], scheduled["a"]]
    assert [t.parent_list for t in trees] == [second.parents.tolist(), [], first.parents.tolist()]
