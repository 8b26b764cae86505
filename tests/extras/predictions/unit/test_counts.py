"""The counts of a prediction are there whatever ends the answer, and never exceed it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from vllm import SamplingParams
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from tests.engine.prompts import tokenizer
from tests.unit.hooks.frontend import engine_request, output_hooks
from vllm_trie.extras.predictions import counts as module
from vllm_trie.extras.predictions.counts import CARRIED, COUNTS
from vllm_trie.extras.predictions.source import PREDICTION
from vllm_trie.hooks import ledger
from vllm_trie.hooks.wire import STATS_ATTRIBUTE, TreeStats

TOKENS = tokenizer().encode("def count_words(lines):")


@pytest.fixture(autouse=True)
def _patched():
    with output_hooks("speculation"):
        yield


class Request:
    """A request in the front end; a list or a collector takes its outputs."""

    def __init__(self, queue: Any = None, predicts: bool = True, **options: Any) -> None:
        extra_args = {PREDICTION: b""} if predicts else {}
        params = SamplingParams(extra_args=extra_args, **options)
        request = engine_request([5], params)
        self._processor = OutputProcessor(tokenizer(), log_stats=False)
        self._processor.add_request(request, "text", None, 0, queue)

    def step(
        self, tokens: list[int], counts: tuple[int, int] | None, ends: bool = False
    ) -> list[Any]:
        """Process the output of a step, with the sums of the counts if the step has any."""
        output = EngineCoreOutput(
            "a", [*tokens], finish_reason=FinishReason.LENGTH if ends else None
        )
        if counts is not None:
            output.kv_transfer_params = {CARRIED: dict(zip(COUNTS, counts, strict=True))}
        return self._processor.process_outputs([output]).request_outputs


def counts_of(result: Any) -> tuple[int, int]:
    [output] = result.outputs
    return tuple(getattr(output, name) for name in COUNTS)  # type: ignore[return-value]


def test_an_answer_without_drafts():
    [result] = Request().step(TOKENS, None, ends=True)
    assert counts_of(result) == (0, 0)
    [result] = Request(predicts=False).step(TOKENS, None, ends=True)
    assert not hasattr(result.outputs[0], COUNTS[0])


def test_an_answer_with_drafts():
    request = Request(output_kind=RequestOutputKind.FINAL_ONLY)
    assert not request.step(TOKENS[:1], None)
    assert not request.step(TOKENS[1:4], (2, 6))
    [result] = request.step(TOKENS[4:], None, ends=True)
    assert counts_of(result) == (2, 6)
    assert result.kv_transfer_params is None


def test_counts_of_all_steps_travel_next_to_what_outputs_have():
    scheduler: Any = SimpleNamespace(requests={"a": SimpleNamespace()})
    sent = []
    for counts in ((1, 2), (3, 4)):
        of_step = dict(zip(COUNTS, counts, strict=True))
        report = TreeStats(of_requests={"a": of_step, "aborted": of_step})
        output = EngineCoreOutput("a", [5], kv_transfer_params={"remote": 1})
        module.update_from_output(
            lambda *_, output=output: {0: SimpleNamespace(outputs=[output])},
            *(scheduler, None, SimpleNamespace(**{STATS_ATTRIBUTE: report})),
        )
        assert not report.of_requests
        sent.append(output.kv_transfer_params)
    expected = [dict(zip(COUNTS, counts, strict=True)) for counts in ((1, 2), (4, 6))]
    assert sent == [{"remote": 1, CARRIED: counts} for counts in expected]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_stop_string_cuts_accepted_tokens_off(kind):
    request = Request(output_kind=kind, stop=[tokenizer().decode(TOKENS[1:3])])
    [result] = request.step(TOKENS, (len(TOKENS) - 1, 2))
    output = result.outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("stop", 3)
    assert counts_of(result) == (3, 2 + len(TOKENS) - 1 - 3)


def test_outputs_that_nobody_takes_in_the_meantime():
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "A")
    request = Request(collector, output_kind=RequestOutputKind.DELTA)
    for tokens, counts in ((TOKENS[:1], None), (TOKENS[1:3], (1, 3)), (TOKENS[3:], (2, 5))):
        request.step(tokens, counts, ends=tokens[-1] == TOKENS[-1])
    result = collector.get_nowait()
    assert list(result.outputs[0].token_ids) == TOKENS
    assert counts_of(result) == (2, 5)


@pytest.mark.parametrize("streams", [False, True])
def test_the_usage_of_answers(streams, monkeypatch):
    """The counts of all requests of an answer are summed, whichever prompt and choice they are of;
    other requests at the same time have no part in it."""
    usage = UsageInfo(completion_tokens=8)
    monkeypatch.setattr(module, "take_prediction", AsyncMock())
    counted = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 11}

    async def respond(serving: Any, request: Any) -> Any:
        async def stream() -> AsyncIterator[str]:
            generate()
            for choices in ([{}], []):
                yield f"data: {json_of(choices, usage)}\n\n"

        if streams:
            return stream()
        generate()
        return SimpleNamespace(usage=usage)

    def generate() -> None:
        for counts in ((1, 5), (5, 6)):
            request = Request(output_kind=RequestOutputKind.FINAL_ONLY)
            request.step(TOKENS, counts, ends=True)

    async def ask() -> Any:
        request = SimpleNamespace(vllm_xargs={PREDICTION: b""})
        answer = await module._answer(respond, SimpleNamespace(), request)
        Request().step(TOKENS, (9, 9), ends=True)
        return [json.loads(chunk[6:]) async for chunk in answer] if streams else answer

    answer = asyncio.run(ask())
    if streams:
        first, last = (chunk["usage"] for chunk in answer)
        assert "completion_tokens_details" not in first
        assert last["completion_tokens_details"] == {"reasoning_tokens": 0, **counted}
    else:
        assert answer.usage.completion_tokens_details.model_dump() == {
            "reasoning_tokens": 0,
            **counted,
        }


def json_of(choices: list[Any], usage: UsageInfo) -> str:
    body = {"choices": choices, "usage": usage.model_dump(exclude_none=True)}
    return json.dumps(body, separators=(",", ":"))


def test_answers_keep_what_a_feature_adds_where_the_other_steps_aside():
    for name in ("create_chat_completion", "create_completion", "create_responses"):
        hooks = [patch for patch in ledger.entries() if patch.target.endswith(name)]
        assert {patch.feature for patch in hooks} == {"speculation", "beam"}
