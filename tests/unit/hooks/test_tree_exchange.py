"""Trees survive the way from one rank to another."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import flags, token_trees
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.drafts.engine.start.verifier_setup import same_on_all_ranks
from vllm_trie.tree import TokenTree


class Rank:
    """One of two ranks; what rank 0 broadcasts waits in `sent`."""

    world_size = 2
    sent: bytes

    def __init__(self, rank_in_group: int) -> None:
        self.rank_in_group = rank_in_group

    def broadcast_object(self, value: Any = None) -> Any:
        if self.rank_in_group == 0:
            Rank.sent = pickle.dumps(value)
        return pickle.loads(Rank.sent)


@st.composite
def flagged_trees(draw: st.DrawFn) -> TokenTree:
    tree = draw(token_trees(max_nodes=12))
    if draw(st.booleans()):
        tree = dataclasses.replace(tree, never_accept=flags(draw, tree.num_nodes))
    return tree


@given(st.lists(flagged_trees(), min_size=1, max_size=5), st.data())
def test_all_ranks_get_the_trees_of_rank_0(trees, data):
    others = [data.draw(flagged_trees()) for _ in trees]
    first: Any = Rank(0)
    second: Any = Rank(1)
    assert same_on_all_ranks([], second) == []  # before anything is sent
    assert same_on_all_ranks(trees, first) is trees
    received = same_on_all_ranks(others, second)
    for before, after in zip(trees, received, strict=True):
        assert np.array_equal(before.token_ids, after.token_ids)
        assert np.array_equal(before.parents, after.parents)
        assert (before.never_accept is None) == (after.never_accept is None)
        if before.never_accept is not None:
            assert np.array_equal(before.never_accept, after.never_accept)
        after.validate(vocab_size=6, max_nodes=12)


def test_all_ranks_pause_with_rank_0():
    budgets = NodeBudget(), NodeBudget()
    budgets[0].pause = 3, 2, 8
    for number, budget in enumerate(budgets):
        group: Any = Rank(number)
        same_on_all_ranks([TokenTree.empty()], group, budget)
    drafts = [[budget.should_draft(2) for _ in range(5)] for budget in budgets]
    assert drafts == [[False] * 3 + [True] * 2] * 2
