"""A step of tree speculation, with arrays in place of a model runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.drafters.support import VOCAB, make_context, make_request
from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import Drafter, DrafterOptions, DraftRequest
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter
from vllm_trie.vllm_hooks.worker.verification.compaction import CacheGroup
from vllm_trie.vllm_hooks.worker.verification.placement import QueryTokens, logits_tokens
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

TREE = TokenTree.from_lists([5, 6, 7, 8], [-1, -1, 1, 1])
"""Two tokens after the committed text, 5 and 6; 7 and 8 may follow the 6."""
GREEDY: Any = SimpleNamespace(
    all_greedy=True,
    max_num_logprobs=None,
    logprob_token_ids=None,
    no_penalties=True,
    bad_words_token_ids=None,
    allowed_token_ids_mask=None,
    thinking_budget_state_holder=None,
    logitsprocs=SimpleNamespace(non_argmax_invariant=[]),
)


class FixedDrafter(Drafter):
    """Proposes one tree for every request."""

    name = "fixed"
    Options = DrafterOptions
    needs_node_argmax = True
    needs_hidden_states = True

    def __init__(self) -> None:
        super().__init__(DrafterOptions(), make_context())
        self.requests: list[DraftRequest] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.requests = list(requests)
        return [TREE] * len(requests)


class ArgmaxSampler:
    """vLLM's sampler for plain greedy requests."""

    def __call__(self, logits: torch.Tensor, sampling_metadata: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=logits.argmax(-1, keepdim=True))


SAMPLER: Any = ArgmaxSampler()


def one_hot(tokens: Sequence[int]) -> torch.Tensor:
    """Logits with their maximum at the given tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


@pytest.fixture
def trees() -> TreeVerifier:
    """After a prefill of the requests "a" and "b", with a tree for each."""
    guard = GuardedDrafter(FixedDrafter(), VOCAB, 30.0, logging.getLogger("tests.verifier"))
    verifier = TreeVerifier(guard)
    verifier.start_step(0)
    verifier.begin_step(["a", "b"], {}, 9)
    output = verifier.verify(one_hot([1, 2]), SAMPLER, GREEDY, [[], []])
    assert output.sampled_token_ids.tolist() == [[1], [2]]
    verifier.end_step([[1], [2]])
    requests = {i: make_request([0, 3, i], request_id) for i, request_id in enumerate("ab")}
    drafts = verifier.draft(requests, 2, torch.zeros(2, 4), time.perf_counter())
    assert drafts == [TREE.token_list] * 2
    return verifier


def test_a_step_with_trees(trees: TreeVerifier) -> None:
    trees.start_step(2)
    trees.begin_step(["b", "a"], {"a": [5, 6, 7, 8], "b": [5, 6]}, 8)
    assert [tree.num_nodes for tree in trees.step_trees] == [2, 4]

    positions = torch.tensor([10, 11, 12, 20, 21, 22, 23, 24])
    starts, computed = np.array([0, 3, 8], dtype=np.int32), np.array([10, 20])
    ids = torch.zeros(8, dtype=torch.int32)
    trees.place(QueryTokens(starts, computed, positions, ids), takes_chains=True)
    assert positions.tolist() == [10, 11, 11, 20, 21, 21, 22, 22]
    assert trees.tree_batch is not None
    assert trees.tree_batch.rows == [(0, 0, 3, 2, 13, 0), (1, 3, 5, 4, 25, 0)]
    assert trees.tree_batch.covers_batch
    assert logits_tokens(np.array([2, 4]), starts[1:]).tolist() == list(range(8))

    # "b": another token than its nodes'. "a": 6, then 8, then 9.
    logits = one_hot([4, 0, 0] + [6, 0, 8, 0, 9])
    output = trees.verify(logits, SAMPLER, GREEDY, [[], []])
    assert output.sampled_token_ids.tolist() == [[4, -1, -1], [6, 8, 9]]

    cache = torch.arange(8.0).repeat_interleave(2).view(1, 1, 8, 2)
    moves = []

    def move(caches: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        moves.append((source.tolist(), target.tolist()))

    trees.compact([CacheGroup(0, (cache,), move)], [torch.arange(8) + 100])
    assert moves == [([105, 107], [104, 105])]  # nodes 1 and 3 of "a" to the places of 0 and 1

    trees.end_step([[4], [6, 8, 9]])
    states = torch.arange(8.0)[:, None]
    trees.draft({1: make_request([0, 3, 0, 6, 8, 9], "a")}, 2, states, time.perf_counter())
    drafter: Any = trees.guard.drafter
    (request,) = drafter.requests
    assert request.hidden_state.tolist() == [7.0]  # the row that gave the 9
    assert request.last_step.accepted == (1, 3)
    assert request.last_step.node_argmax.tolist() == [6, 0, 8, 0, 9]
    stats = trees.take_stats()
    assert stats is not None
    assert (stats.steps, stats.tokens) == (4, 6)  # with the prefill's
    assert trees.totals == stats
    assert trees.take_stats() is None


def test_a_cut_or_changed_draft(trees: TreeVerifier) -> None:
    trees.begin_step(["a", "b"], {"a": [5, 6, 7], "b": [6, 7]}, 7)
    assert [tree.parent_list for tree in trees.step_trees] == [[-1, -1, 1], [-1, 0]]


def test_a_released_request_leaves_nothing_behind(trees: TreeVerifier) -> None:
    trees.release("a")
    trees.begin_step(["a"], {"a": [5, 6]}, 3)
    assert trees.step_trees[0].is_chain
    trees.draft({0: make_request([0, 3], "a")}, 1, torch.zeros(3, 4), time.perf_counter())
    drafter: Any = trees.guard.drafter
    assert drafter.requests[0].last_step is None


def test_trees_of_requests_outside_the_batch_stay(trees: TreeVerifier) -> None:
    trees.begin_step(["b"], {}, 1)
    trees.end_step([[3]])
    trees.begin_step(["a", "b"], {"a": TREE.token_list, "b": TREE.token_list}, 10)
    assert [tree.is_chain for tree in trees.step_trees] == [False, True]


def test_the_budget_pauses_drafting_on_one_rank_only(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = GuardedDrafter(FixedDrafter(), VOCAB, 30.0, logging.getLogger("tests.verifier"))
    monkeypatch.setattr(NodeBudget, "should_draft", lambda self, num_requests: False)
    for share_trees, is_pausing in ((None, True), (lambda trees: trees, False)):
        verifier = TreeVerifier(guard, NodeBudget(), share_trees)
        verifier.start_step(1)
        assert verifier.is_pausing == is_pausing


def test_the_last_save_holds_requests_that_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler tells of them with the next step, and an engine that ends has none."""
    said: list[str] = []
    drafter = FixedDrafter()
    monkeypatch.setattr(drafter, "release", said.append)
    saving: Any = SimpleNamespace(close=lambda: said.append("saved"), tick=lambda: None)
    guard = GuardedDrafter(drafter, VOCAB, 10.0, logging.getLogger(__name__))
    trees = TreeVerifier(guard, warm_start=saving)
    trees.begin_step(["a", "b"], {}, 2)
    trees.observe_outputs([[1], [2]])
    trees.close()
    assert said == ["a", "b", "saved"]
