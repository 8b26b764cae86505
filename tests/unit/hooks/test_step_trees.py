"""The tree that a step verifies, whatever the scheduler did to the draft."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.support import VOCAB, make_context, make_request
from tests.unit.tree.strategies import token_trees
from vllm_trie.drafts import Drafter, DrafterOptions, DraftRequest
from vllm_trie.drafts.budget import DraftForecast, NodeBudget
from vllm_trie.drafts.engine.guard import GuardedDrafter
from vllm_trie.drafts.engine.verification.placement import scheduled_tree
from vllm_trie.drafts.engine.verifier import TreeVerifier
from vllm_trie.tree import TokenTree


@given(token_trees(), st.integers(0, 50))
def test_a_draft_that_was_cut_keeps_its_branches(tree, kept):
    scheduled = tree.token_ids.tolist()[:kept]
    rebuilt = scheduled_tree(tree, scheduled)
    assert rebuilt.token_list == rebuilt.token_ids.tolist() == scheduled
    assert rebuilt.parent_list == rebuilt.parents.tolist() == tree.parents.tolist()[:kept]
    assert rebuilt.depths().tolist() == tree.depths().tolist()[:kept]


@given(st.none() | token_trees(vocab_size=4), st.lists(st.integers(-1, 5), min_size=1, max_size=20))
def test_any_other_list_is_a_chain(tree, scheduled):
    rebuilt = scheduled_tree(tree, scheduled)
    assert rebuilt.token_list == rebuilt.token_ids.tolist() == scheduled
    if tree is None or tree.token_list[: len(scheduled)] != scheduled:
        assert rebuilt.is_chain


class FixedDrafter(Drafter):
    """Proposes a tree of two branches for every request."""

    name = "fixed"
    Options = DrafterOptions

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [TokenTree.from_lists([5, 6, 7, 8], [-1, -1, 1, 1])] * len(requests)


def make_verifier(*options: Any) -> TreeVerifier:
    drafter = FixedDrafter(DrafterOptions(), make_context())
    guard = GuardedDrafter(drafter, VOCAB, 30.0, logging.getLogger("tests.verifier"))
    return TreeVerifier(guard, *options)


def test_trees_of_requests_outside_the_batch_stay():
    verifier = make_verifier(NodeBudget())
    step = verifier.begin_step(["a", "b"], {}, 9, [0, 1, 2], 0.0)
    requests = {i: make_request([0, 3, i], request_id) for i, request_id in enumerate("ab")}
    drafted = verifier.draft(step, requests, torch.zeros(2, 4), time.perf_counter())[0]
    assert verifier.clock._ended > 0.0, "drafting counts as time of the next step"
    assert verifier.budget._drafting_seconds != NodeBudget()._drafting_seconds
    draft = drafted.copy()
    drafted.clear()  # as vLLM may
    verifier.end_step(verifier.begin_step(["b"], {}, 1, [0, 1], 0.0), [[3]])
    step = verifier.begin_step(["a", "b"], {"a": draft, "b": draft}, 10, [0, 5, 10], 0.0)
    assert [tree.is_chain for tree in step.trees] == [False, True]


def test_of_a_step_that_has_ended_little_is_left():
    """Its duration only where it has no prefill."""
    verifier = make_verifier(NodeBudget())
    for num_tokens in (9, 1):
        step = verifier.begin_step(["a"], {}, num_tokens, [0, 1], 1.0)
        step.ended, step.tree_batch = 2.0, SimpleNamespace()
        verifier.stats.count("a", {"kind": 1})
        verifier.end_step(step, [[3]])
        assert step.tree_batch is None
    verifier.take_stats()
    assert (verifier.totals.steps, verifier.totals.of_requests) == (2, {})
    assert [*verifier.budget.cost._expected] == [1]


@pytest.mark.parametrize("should_draft", [False, True])
def test_the_budget_decides_before_drafts_on_one_rank_only(monkeypatch, should_draft):
    monkeypatch.setattr(NodeBudget, "should_draft", lambda self, num_requests: should_draft)
    monkeypatch.setattr(NodeBudget, "least_probability", lambda self, num_requests: 0.5)
    for share_trees, is_alone in ((None, True), (lambda trees: trees, False)):
        step = make_verifier(NodeBudget(), share_trees).begin_step(["a"], {}, 1, [0, 1], 0.0)
        assert step.is_pausing == (is_alone and not should_draft)
        assert step.least_probability == (0.5 if is_alone and should_draft else 0.0)


@pytest.mark.parametrize("share_trees", [None, lambda trees: trees])
def test_rejected_nodes_are_forgotten_with_time(share_trees):
    budget = NodeBudget()
    predicted = np.full(100, 0.9)
    budget.acceptance.observe(predicted, np.empty(0, dtype=np.int64))
    assert budget.acceptance(predicted)[0] < 0.7
    verifier = make_verifier(budget, share_trees)
    for _ in range(4000):
        verifier.begin_step(["a"], {}, 1, [0, 1], 0.0)
    assert budget.acceptance(predicted)[0] > 0.8


def test_a_step_ahead_of_drafts_has_a_place_for_each_that_may_have_one():
    """Also where no node is worth its cost, as the host would wait without any."""
    verifier = make_verifier(NodeBudget())
    verifier.forecast = DraftForecast(4)
    for num_tokens in (1, 100):
        verifier.budget.cost.expect(num_tokens, num_tokens)
    assert verifier.planned_lengths({"a": 4, "b": 0}) == {"a": 1, "b": 0}
