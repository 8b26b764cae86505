"""Steps of Model Runner V2 in the adapter, with arrays in place of a runner."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.triton_utils import triton
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.oracles.delivery import Kernel
from tests.unit.drafters.support import make_context
from tests.unit.hooks.test_tree_exchange import Rank
from tests.unit.hooks.v2_load import Load
from tests.unit.hooks.v2_steps import WIDTH, OneToken, Steps
from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.drafts.engine.runners import v2_delivery
from vllm_trie.drafts.engine.runners.v2 import DraftedOnly
from vllm_trie.drafts.engine.start.verifier_setup import same_on_all_ranks
from vllm_trie.drafts.ngram_trie import NgramTrieDrafter
from vllm_trie.tree import TokenTree


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_a_load(seed):
    """See :mod:`.v2_load` for what is drawn and what is checked."""
    with Load(seed) as load:
        load.run(40)
        load.end()


class Endless(Load):
    """Requests that never end nor miss a step, after which prepared drafts may differ."""

    max_model_len = 400
    lengths = (300,)
    absences = (0.0,)
    stops = ({"ignore_eos": True},)


def test_the_texts_drafts_are_the_same_if_they_were_prepared():
    """Samples of prompts, rows of logits, requests without drafts and ones that start again."""
    verified, num_prepared = [], []
    for prepares in (True, False):
        loads = []
        for seed in (4, 5, 8):
            options = NgramTrieDrafter.Options(recycle=True, max_context_len=3)
            drafter = NgramTrieDrafter(options, make_context())
            if not prepares:
                drafter.prepare = lambda *unused: None  # type: ignore[method-assign,assignment]
            with Endless(seed, drafter) as load:
                load.run(30)
            loads.append(load)
        verified.append([load.verified for load in loads])
        num_prepared.append(sum(load.num_prepared for load in loads))
    assert verified[0] == verified[1]
    assert sum(len(draft) for steps in verified[0] for step in steps for draft in step) > 300
    assert num_prepared[0] > 15
    assert num_prepared[1] == 0


def test_nothing_is_launched_ahead_where_the_device_gives_up(monkeypatch):
    """Three times in a row: for ten minutes, as the host may only have stopped for a moment, then
    for an hour, as something may wait each time."""
    with Load(2, OneToken(), lateness=1.0) as load:
        load.run(40)
        assert load.stream.num_ahead == 4
        assert not load.adapter.launches_ahead
        now = time.monotonic() + 601
        monkeypatch.setattr(time, "monotonic", lambda: now)
        load.run(40)
        assert load.stream.num_ahead == 7
        now += 3599
        assert not load.adapter.launches_ahead
        now += 2
        assert load.adapter.launches_ahead


def test_the_check_at_start_up_launches_steps_as_the_engine_will():
    """Whatever it drafts with in the meantime."""
    for needs, launches_ahead in ((True, False), (False, True)):
        drafter: Any = OneToken()
        drafter.needs_hidden_states = needs
        with Load(2, drafter) as load:
            load.adapter.verifier.guard.drafter = OneToken()
            assert load.adapter.launches_ahead == launches_ahead


# -- steps whose tokens are given ------------------------------------------------------------------


@pytest.fixture
def stand_ins(monkeypatch):
    """Stand-ins for what is the device's."""
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(v2_delivery, "_take_drafts", Kernel())
    monkeypatch.setattr(triton, "next_power_of_2", int, raising=False)


def test_requests_of_the_warm_up_are_not_drafted_for(stand_ins):
    steps = Steps()
    steps.adapter._state = "warm-up"
    steps.add("_warmup_0_", [7, 8])
    steps.run_step({"_warmup_0_": [11]})
    assert not steps.adapter.draft()
    assert not steps.adapter.running


class Likely(OneToken):
    """Drafts one token, whose probability changes from call to call."""

    num_calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.num_calls += 1
        probability = 0.001 if self.num_calls % 3 else 0.5
        return [TokenTree.from_lists([5], [-1], [probability])] * len(requests)


class Timed(NodeBudget):
    """Learns that steps take as long as they were expected to, and drafting nothing."""

    def __init__(self, seconds_of_node: float) -> None:
        super().__init__(drafting_waits=True)
        for num_tokens in (1, 2, 4, 8):
            self.cost.expect(num_tokens, 0.01 + seconds_of_node * num_tokens)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        super().observe_step(num_tokens, self.cost(num_tokens))

    def observe_drafting(self, seconds: float) -> None:
        super().observe_drafting(0.0)


def test_ranks_with_budgets_of_their_own_wait_after_the_same_steps(stand_ins):
    """Nodes are dear on rank 0 and cheap on the other; requests end and begin."""
    ranks = [Steps(Likely()), Steps(Likely())]
    for number, (rank, seconds_of_node) in enumerate(zip(ranks, (1.0, 1e-6), strict=True)):
        group: Any = Rank(number)
        verifier = rank.adapter.verifier
        verifier.budget = budget = Timed(seconds_of_node)
        verifier.share_trees = partial(same_on_all_ranks, group=group, budget=budget)
    rng = random.Random(0)
    total = left = 0
    for _ in range(250):
        begins = not left
        if begins:
            left = rng.randint(1, 9)
            for rank in ranks:
                rank.adapter.release(["a"])
                rank.add("a", [7, 8], max_tokens=left)
        left -= 1
        waits = []
        for rank in ranks:
            rank.run_step({"a": [11]}, scheduled=0 if begins else WIDTH)
            waits.append(rank.adapter.draft())
        assert waits[0] == waits[1]
        total += waits[0]
    assert 10 < total < 200


# -- verification ----------------------------------------------------------------------------------


def make_sampler(kind: Any, adapter: Any) -> Any:
    """Make a rejection sampler as the runner does."""
    config = SimpleNamespace(
        num_speculative_tokens=WIDTH,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
        fly_entropy_threshold=0.3,  # this and the next since vLLM 0.33
        fly_entropy_top_k=3,
    )
    sampler = SimpleNamespace(get_logprobs_dims=lambda indices: None)
    return kind(SimpleNamespace(sampler=sampler, watermark_key=None), config, adapter)


def test_only_drafted_tokens_are_valid(monkeypatch):
    passed: list[list[bool]] = []
    monkeypatch.setattr(
        RejectionSampler, "__call__", lambda *arguments: passed.append(arguments[4].tolist())
    )
    batch: Any = SimpleNamespace(
        # Three rows of request 1, three of request 2; the first row of each verifies no draft.
        expanded_idx_mapping=torch.tensor([1, 1, 1, 2, 2, 2]),
        expanded_local_pos=torch.tensor([0, 1, 2, 0, 1, 2]),
        idx_mapping_np=np.array([1, 2]),
    )
    read: list[torch.Tensor] = []
    adapter: Any = SimpleNamespace(
        num_drafted=torch.tensor([9, 2, 0]),
        is_drafting=True,
        resume=lambda part, logits: read.append(logits),
    )
    sampler, logits = make_sampler(DraftedOnly, adapter), torch.empty(6, 4)
    theirs = [False, False, True, False, False, False]
    sampler(logits, batch, None, None)
    sampler(logits, batch, None, torch.tensor(theirs))
    assert read == [logits] * 2
    adapter.is_drafting = False  # vLLM's warm-up, which nothing of the plugin may stop
    sampler(logits, batch, None, torch.tensor(theirs))
    fillers = [False, False, False, False, True, True]
    assert passed == [fillers, [False, False, True, False, True, True], theirs]
