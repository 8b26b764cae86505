"""The judgement of the check at start-up; an engine runs it in `tests.engine.gpu_startup`."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.unit.drafters.support import VOCAB, make_context
from tests.unit.hooks.test_v2_adapter import NextNumbers
from vllm_trie.drafters import DraftRequest
from vllm_trie.vllm_hooks.worker import drafting_worker, start_check
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter

MARGINS = [{7: 0.0, 9: 0.1}, {8: 0.0, 3: 2.0}]
GREEDY = start_check._Prompt([1], SamplingParams(temperature=0.0))
MASKED = start_check._Prompt([1], SamplingParams(temperature=0.0), has_grammar=True)
SAMPLED = start_check._Prompt([1], SamplingParams(temperature=0.4))


def decoded(tokens: list[int], seconds: float = 1.0, per_step: float = 1.0) -> Any:
    return start_check._Decoded([tokens], [MARGINS], seconds, per_step)


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
    runs = decoded([7, 8]), decoded(tokens, seconds, per_step)
    wrong = start_check._wrong_token([prompt], *runs, allowed=0.15)
    reason = wrong or start_check._slowdown(*runs)
    assert reason is None if said is None else said in reason


def test_near_ties_are_wider_in_16_bits() -> None:
    assert start_check.near_tie(torch.float32) == 0.15
    assert start_check.near_tie(torch.bfloat16) == start_check.near_tie(torch.float16) == 1.0


def test_drafts_of_the_check_are_right_but_for_some(monkeypatch) -> None:
    drafter = start_check._KnownAnswers(make_context(), {(1, 2): [3, 4, 5, 6]})

    def draft(output: list[int]) -> list[int]:
        text = np.array([1, 2, *output], dtype=np.int32)
        (tree,) = drafter.propose([DraftRequest("a", text, 2, 2, 2)])
        return tree.token_list

    monkeypatch.setattr(start_check, "_ALIGNED", 2)  # rows, in every other step
    assert draft([3]) == [4]
    assert draft([3]) == [4, 5]
    assert draft([3, 4, 5]) == [6]
    assert draft([3, 4, 5, 6]) == []
    drafter._num_calls = 1
    assert draft([]) == [3, 5]


@pytest.mark.parametrize("fails_in", ["__init__", "draft", "execute_model", None])
def test_a_rank_that_raises_leaves_none_waiting(monkeypatch, fails_in) -> None:
    """Two ranks that wait for each other in each step, as in a model's collectives."""
    meeting, said = threading.Barrier(2, timeout=10), dict[int, Any]()
    reasons: list[str | None] = [None, None]

    class Steps(start_check._Decoder):
        prompts, dtype = [GREEDY], torch.float32

        def __init__(self, worker: Any, adapter: Any, agree: Any) -> None:
            self._worker, self._adapter, self._agree = worker, adapter, agree
            worker.fail_in("__init__")

        def run(self, name: str, num_drafts: int) -> Any:
            for _ in range(3):
                self._execute(SimpleNamespace(), {"a": 1})
            return decoded([7, 8])

    class Rank:
        def __init__(self, number: int) -> None:
            self.number, self.begun = number, False

        def fail_in(self, name: str) -> None:
            if name == fails_in and self.number and (self.begun or name == "__init__"):
                raise RuntimeError(f"in {name}")

        def agree(self, why: str | None) -> str | None:
            reasons[self.number] = why
            meeting.wait()
            first = next(filter(None, reasons), None)
            meeting.wait()
            return first

        def execute_model(self, step: Any) -> None:
            meeting.wait()
            self.fail_in("execute_model")

        def check(self) -> None:
            guard = SimpleNamespace(drafter=SimpleNamespace(context=None))
            adapter: Any = SimpleNamespace(
                trees=SimpleNamespace(guard=guard, budget=None),
                num_places=4,
                begin=lambda: setattr(self, "begun", True),
                draft=lambda: self.fail_in("draft"),
                forget_stats=lambda: None,
            )
            worker: Any = self
            said[self.number] = start_check.reason_against_drafts(worker, adapter, self.agree)

        sample_tokens = staticmethod(lambda grammar: None)

    monkeypatch.setattr(start_check, "_Decoder", Steps)
    ranks = [threading.Thread(target=Rank(number).check) for number in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert said == dict.fromkeys(range(2), fails_in and f"RuntimeError: in {fails_in}")


@pytest.mark.parametrize(
    ("why", "num_workers", "state"),
    [
        (None, 1, "begun"),
        ("it raised", 1, "it raised"),
        ("it raised", 2, "begun"),  # the other stage or rank takes no part in a check
    ],
)
def test_an_engine_begins_to_draft_or_serves_without(monkeypatch, why, num_workers, state) -> None:
    done: list[str] = []
    adapter: Any = SimpleNamespace(begin=lambda: done.append("begun"), switch_off=done.append)
    worker: Any = object.__new__(drafting_worker.DraftingWorkerMixin)
    worker.checks_start = True
    worker.parallel_config = SimpleNamespace(
        world_size_across_dp=num_workers, tensor_parallel_size=1
    )
    monkeypatch.setattr(start_check, "reason_against_drafts", lambda *arguments: why)
    worker._begin_drafting(adapter)
    assert done == [state]


def test_a_refused_drafter_is_counted_and_said_once(caplog) -> None:
    guard = GuardedDrafter(NextNumbers(), VOCAB, 30.0, logging.getLogger("tests.check"))
    guard.refuse("it raised")
    assert guard.take_new_failures() == {"start_check": 1}
    assert len(caplog.records) == 1
    assert "serves without drafts, as its check at start-up failed: it raised" in caplog.text
    text = np.array([1, 2], dtype=np.int32)
    for number in range(3):
        (tree,) = guard.propose([DraftRequest(str(number), text, 2, 2, 2)])
        assert tree.num_nodes == 0
        guard.release(str(number))
    assert not guard._unreleased
