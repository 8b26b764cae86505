"""The judgement of the check at start-up; an engine runs it in `tests.engine.gpu_startup`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput

from tests.unit.drafters.support import make_context
from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.engine.start.verifier_setup import same_on_all_ranks
from vllm_trie.drafts.engine.workers import drafting_worker
from vllm_trie.extras.device_checks import gpu_check, start_check
from vllm_trie.tree import TokenTree

MARGINS = [{7: 0.0, 9: 0.1}, {8: 0.0, 3: 2.0}]
GREEDY = start_check.Prompt([1], SamplingParams(temperature=0.0))
MASKED = start_check.Prompt([1], SamplingParams(temperature=0.0), has_grammar=True)
SAMPLED = start_check.Prompt([1], SamplingParams(temperature=0.4))
PLACES = ("start", "draft", "share", "execute_model", "end")
RANKS_FAIL_IN = [
    *((place, None) for place in PLACES),
    *((None, place) for place in PLACES),
    ("draft", "end"),  # the second, once the first has refused
    ("end", "draft"),
    (None, None),
]
"""Where each of two ranks raises."""
LIMIT_S = 60


def decoded(
    tokens: list[int], seconds: float = 1.0, per_step: float = 1.0, margins: Any = MARGINS
) -> Any:
    return start_check.Decoded([tokens], [margins], seconds, per_step)


@pytest.mark.parametrize(
    ("prompt", "tokens", "seconds", "per_step", "said"),
    [
        (GREEDY, [7, 8], 1.5, 2.0, None),
        (GREEDY, [9, 1], 1.5, 2.0, None),  # a near-tie, and another text behind it
        (GREEDY, [7, 3], 1.5, 2.0, "greedy token 1 of a test prompt is 3, without drafts 8"),
        (GREEDY, [7, 4], 1.5, 2.0, "greedy token 1 of a test prompt is 4"),
        (GREEDY, [7, 8], 2.1, 2.0, "a token takes 1.05e+03 ms with drafts that are nearly always"),
        (MASKED, [9, 8], 1.5, 2.0, "token 0 of a test prompt is 9, which is masked"),
        (SAMPLED, [9, 3], 1.5, 2.0, None),
        (SAMPLED, [9, 5], 1.5, 2.0, "sampled token 1 of a test prompt is 5, which is too unlikely"),
        (SAMPLED, [6, 3], 1.5, 2.0, "sampled token 0 of a test prompt is 6"),
    ],
)
def test_what_forbids_drafts(prompt, tokens, seconds, per_step, said, monkeypatch) -> None:
    monkeypatch.setitem(MARGINS[1], 5, 9.0)
    monkeypatch.setitem(MARGINS[0], 6, float("nan"))
    # Greedy tokens are the likeliest of the steps that gave them.
    argmax = [{token: 0.0, token + 1: 0.5} for token in tokens]
    margins = MARGINS if prompt is SAMPLED else argmax
    runs = decoded([7, 8]), decoded(tokens, seconds, per_step, margins)
    wrong = start_check.wrong_token([prompt], *runs, allowed=0.15)
    reason = wrong or start_check._slowdown(*runs)
    assert reason is None if said is None else said in reason


def test_a_greedy_token_is_the_likeliest_of_its_step() -> None:
    runs = decoded([9, 8]), decoded([9, 8])
    wrong = start_check.wrong_token([GREEDY], *runs, allowed=1.0)
    assert wrong == "greedy token 0 of a test prompt is 9, which is not the likeliest"


def test_near_ties_are_wider_in_16_bits() -> None:
    assert start_check.near_tie(torch.float32) == 0.15
    assert start_check.near_tie(torch.bfloat16) == start_check.near_tie(torch.float16) == 1.0


def test_drafts_of_the_check_are_right_but_for_some(monkeypatch) -> None:
    drafter = start_check.KnownAnswers(make_context(), {(1, 2): [3, 4, 5, 6]})

    def draft(output: list[int], max_nodes: int = 2, chain_only: bool = True) -> TokenTree:
        text = np.array([1, 2, *output], dtype=np.int32)
        request = DraftRequest("a", text, 2, max_nodes, max_nodes, chain_only=chain_only)
        (tree,) = drafter.propose([request])
        return tree

    monkeypatch.setattr(start_check, "_ALIGNED", 2)  # rows, in every other step
    assert draft([3]).token_list == [4]
    assert draft([3]).token_list == [4, 5]
    assert draft([3, 4, 5]).token_list == [6]
    assert draft([3, 4, 5, 6]).token_list == []
    drafter._num_calls = 1
    assert draft([]).token_list == [3, 5]
    # Trees begin with a wrong node, one of a single node alone does not.
    tree = draft([3], max_nodes=3, chain_only=False)
    assert (tree.token_list, tree.parent_list) == ([5, 4, 5], [-1, -1, 1])
    tree = draft([3], max_nodes=8, chain_only=False)
    assert (tree.token_list, tree.parent_list) == ([5, 4, 5, 6], [-1, -1, 1, 2])
    assert tree.path_of([4, 5, 6]) == [1, 2, 3]
    assert draft([3, 4], max_nodes=1, chain_only=False).token_list == [5]


def test_the_wait_is_measured_by_steps_without_drafts() -> None:
    drafters: list[Any] = []
    guard: Any = SimpleNamespace(drafter=SimpleNamespace(context=make_context()))

    def run(name: str, num_drafts: int, ahead: bool = False) -> Any:
        drafters.append(guard.drafter)
        return decoded([7, 8], {"plain": 2.0, "waited": 3.0}.get(name, 3.5), 2.0)

    decoder: Any = SimpleNamespace(
        prompts=[GREEDY], dtype=torch.float32, run=run, compile=lambda num_drafts: None
    )
    adapter: Any = SimpleNamespace(
        verifier=SimpleNamespace(guard=guard),
        start_drafting=lambda: None,
        num_draft_tokens=4,
        launches_ahead=True,
    )
    budget = MagicMock()
    assert start_check._compare(decoder, adapter, budget) is None
    budget.expect_wait.assert_not_called()  # the device does not wait for the launch
    adapter.launches_ahead = False
    assert start_check._compare(decoder, adapter, budget) is None
    budget.expect_wait.assert_called_once_with(2.0, 3.0)
    (tree,) = drafters[-1].propose([DraftRequest("a", np.array([1, 7], dtype=np.int32), 1, 4, 4)])
    assert tree.num_nodes == 0


class _Group:
    """Two ranks, as one of them sees the group: each exchange is also the other's next one.

    Args:
        rank: Of the two.
        mail: For each of them.
    """

    world_size = 2

    def __init__(self, rank: int, mail: Sequence[SimpleQueue[Any]]) -> None:
        self.rank_in_group, self._mail = rank, mail

    def exchange(self, what: str, value: Any = None) -> list[Any]:
        """Return what both ranks bring."""
        self._mail[1 - self.rank_in_group].put((what, value))
        other, other_value = self._mail[self.rank_in_group].get(timeout=LIMIT_S)
        assert other == what
        return [value, other_value][:: 1 - 2 * self.rank_in_group]

    def broadcast_object(self, value: Any = None) -> Any:
        return self.exchange("broadcast", value)[0]

    def agree(self, why: str | None) -> str | None:
        return next(filter(None, self.exchange("agree", why)), None)


class _Rank:
    """One of two threads that decode together, without vLLM's groups and model.

    Args:
        group: Of the two.
        fails_in: Where it raises, but for its start once drafts are on.
    """

    def __init__(self, group: Any, fails_in: str | None) -> None:
        self._group, self._fails_in = group, fails_in
        self._is_drafting = self._has_sampled = False
        share = partial(same_on_all_ranks, group=self._group)
        guard = SimpleNamespace(drafter=SimpleNamespace(context=None))
        self.verifier = SimpleNamespace(guard=guard, budget=None, share_trees=share)
        self.model_runner = MagicMock()

    def fail_in(self, name: str) -> None:
        if name == self._fails_in and (self._is_drafting or name == "start"):
            raise RuntimeError(f"in {name}")

    def check(self) -> str | None:
        worker: Any = self
        return start_check.reason_against_drafts(worker, worker, self._group.agree)

    # Of the worker:

    def execute_model(self, step: Any) -> None:
        self.draft()
        if not step.num_scheduled_tokens:
            return self.fail_in("end")
        self._group.exchange("execute_model")  # as in a model's collectives
        self.fail_in("execute_model")
        self._names = list(step.num_scheduled_tokens)

    def sample_tokens(self, grammar: Any) -> Any:
        self._has_sampled = True
        logprobs = SimpleNamespace(
            cu_num_generated_tokens=None, logprob_token_ids=[[7]], logprobs=[[0.0]]
        )
        return SimpleNamespace(req_ids=self._names, sampled_token_ids=[[7]], logprobs=logprobs)

    # Of the adapter:

    num_draft_tokens, launches_ahead = 4, False

    def start_drafting(self) -> None:
        self._is_drafting = True

    def draft(self) -> None:
        has_sampled, self._has_sampled = self._has_sampled, False
        if self._is_drafting and has_sampled:
            self.fail_in("draft")
            self.verifier.share_trees([TokenTree.empty()])
            self.fail_in("share")

    def forget_stats(self) -> None:
        pass


class _Steps(start_check._Decoder):
    prompts, dtype = [GREEDY], torch.float32

    def __init__(self, worker: Any, adapter: Any, agreement: Any) -> None:
        self._worker, self._adapter, self._agreement = worker, adapter, agreement
        self._runner: Any = SimpleNamespace(kv_connector=MagicMock())
        self._is_async = False
        worker.fail_in("start")

    def _prefill(self, names: Any, output: Any) -> None:
        output.tokens[0].append(7)
        output.margins[0].append({7: 0.0})

    def _launch(self, names: Any, *unused: Any) -> Any:
        return self._execute(self._empty(), {names[0]: 1})

    def _empty(self) -> Any:
        return SchedulerOutput.make_empty()


@pytest.mark.parametrize("fails_in", RANKS_FAIL_IN)
def test_a_rank_that_raises_leaves_none_waiting(monkeypatch, fails_in) -> None:
    """In each step, and in each exchange of drafts; and a rank logs where both have passed."""
    logger = MagicMock()
    monkeypatch.setattr(start_check, "logger", logger)
    monkeypatch.setattr(start_check, "_Decoder", _Steps)
    monkeypatch.setattr(start_check, "NUM_TOKENS", 3)
    monkeypatch.setattr(start_check, "_slowdown", lambda *runs: None)
    mail: list[SimpleQueue[Any]] = [SimpleQueue(), SimpleQueue()]

    def check(rank: int) -> str | None:
        try:
            return _Rank(_Group(rank, mail), fails_in[rank]).check()
        finally:
            mail[1 - rank].put(("end", None))

    with ThreadPoolExecutor(2) as threads:
        reasons = [*threads.map(check, range(2))]
    expected = next((f"RuntimeError: in {p}" for p in sorted(filter(None, fails_in))), None)
    assert reasons == [expected] * 2
    logged = [call.args[0] for call in logger.info_once.mock_calls]
    # Threads of one process: where they are processes, vLLM logs for the first of them alone.
    assert logged == ([] if expected else ["Drafts passed their check in %.1f s"] * 2)


def test_the_other_stage_or_rank_takes_no_part_in_a_check(monkeypatch) -> None:
    done: list[str] = []
    adapter: Any = SimpleNamespace(
        start_drafting=lambda: done.append("begun"), switch_off=done.append
    )
    worker: Any = object.__new__(drafting_worker.DraftingWorkerMixin)
    worker.checks_start = True
    worker.parallel_config = SimpleNamespace(world_size_across_dp=2, tensor_parallel_size=1)
    monkeypatch.setattr(start_check, "reason_against_drafts", lambda *arguments: "it raised")
    worker._begin_drafting(adapter)
    assert done == ["begun"]


def test_layers_that_get_no_trees_are_not_checked() -> None:
    """A trained drafter's, which may have a backend of their own."""
    layers = {"of a drafter": SimpleNamespace(impl=SimpleNamespace())}
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        attn_groups=[[SimpleNamespace(layer_names=[*layers])]],
    )
    assert not [*gpu_check._layers_to_check(runner)]
