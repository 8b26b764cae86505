"""The outputs of a search are those that vLLM makes of as many requests of one output."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.engine.beam.simulation import prepare_params
from tests.engine.prompts import tokenizer
from tests.unit.hooks.frontend import engine_request, output_hooks
from vllm_trie.hooks.wire import SEARCH_KEY
from vllm_trie.searches.engine.frontend.hypotheses import PROMPT_TAIL
from vllm_trie.searches.engine.search_wire import HypothesisAnswer, SearchAnswer

LENGTHS = (6, 4, 0, 6)
PROMPT = tokenizer().encode("def café(self):\n    return 'naïve'\n" * 12)


@pytest.fixture
def patched():
    with output_hooks("beam"):
        yield


def answer(num_logprobs: int | None) -> tuple[list[list[int]], LogprobsLists | None]:
    generator = np.random.default_rng(0)
    tokens = [generator.integers(3, 250, length).tolist() for length in LENGTHS]  # bytes, too
    if num_logprobs is None:
        return tokens, None
    shape = sum(LENGTHS), 1 + num_logprobs
    token_ids = generator.integers(0, 500, shape, dtype=np.int32)
    values = generator.normal(size=shape).astype(np.float32)
    return tokens, LogprobsLists(token_ids, values, generator.integers(1, 9, sum(LENGTHS)))


def as_vllm_does(params: SamplingParams, num_logprobs: int | None) -> list[Any]:
    processor, request = (
        OutputProcessor(tokenizer(), log_stats=False),
        engine_request(PROMPT, params),
    )
    parent, start, outputs = ParentRequest(request), 0, []
    tokens, logprobs = answer(num_logprobs)
    for index, token_ids in enumerate(tokens):
        name, child_params = parent.get_child_info(index)
        child = engine_request(PROMPT, child_params)
        child.request_id = name
        processor.add_request(child, "text", parent, index)
        some = logprobs and logprobs.slice_request(start, len(token_ids))
        start += len(token_ids)
        outputs.append(
            EngineCoreOutput(
                name, token_ids, some, finish_reason=reason(index), stop_reason=stop(index)
            )
        )
    return processor.process_outputs(outputs, weight_version="1").request_outputs


def reason(index: int) -> FinishReason:
    return FinishReason.STOP if index == 1 else FinishReason.LENGTH


def stop(index: int) -> int | None:
    return 7 if index == 1 else None


def as_a_search(params: SamplingParams, num_logprobs: int | None = None) -> list[Any]:
    processor = OutputProcessor(tokenizer(), log_stats=False)
    request = engine_request(PROMPT, prepare_params(params))
    assert request.params.n == 1
    processor.add_request(request, "text", None, 0)
    assert processor.get_num_queued_tokens() == len(PROMPT)
    assert not processor.process_outputs([EngineCoreOutput("a", [])]).request_outputs
    assert processor.get_num_queued_tokens() == 0
    tokens, logprobs = answer(num_logprobs)
    hypotheses = [
        HypothesisAnswer(
            len(token_ids), reason(i), stop(i), {"score": -i, "cumulative_logprob": -2.0 * i}
        )
        for i, token_ids in enumerate(tokens)
    ]
    columns = logprobs and tuple(array.tobytes() for array in logprobs[:3])
    result = SearchAnswer(hypotheses, columns, {"steps": 6}, None)
    output = EngineCoreOutput(
        "a",
        [*chain(*tokens)],
        finish_reason=reason(0),
        kv_transfer_params={SEARCH_KEY: result},
    )
    # Not a decoder of EngineCoreOutputs: msgspec keeps a class's fields as it first reads them, and
    # the plugin's scheduler statistics are not among them yet.
    received = MsgpackDecoder(list[EngineCoreOutput]).decode(MsgpackEncoder().encode([output]))
    return processor.process_outputs(received, weight_version="1").request_outputs


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 0, "skip_special_tokens": False},
        {"logprobs": 3, "stop": [tokenizer().decode(answer(None)[0][0][2:4])]},
        {"logprobs": 1, "detokenize": False},
        {"include_stop_str_in_output": True, "stop_token_ids": [7]},
    ],
    ids=lambda options: "-".join(options) or "text",
)
def test_outputs(options, kind):
    assert len(PROMPT) > 2 * PROMPT_TAIL
    params = SamplingParams(
        n=len(LENGTHS), output_kind=kind, extra_args={"beam_width": 4}, **options
    )
    expected = as_vllm_does(params, options.get("logprobs"))
    [result] = as_a_search(params, options.get("logprobs"))
    assert result.finished
    assert result.request_id == "A"
    assert len(result.outputs) == len(LENGTHS)
    expected_outputs = [
        output for expected_result in expected for output in expected_result.outputs
    ]
    for index, (output, one) in enumerate(zip(result.outputs, expected_outputs, strict=True)):
        assert output.beam == {"score": -index, "cumulative_logprob": -2.0 * index, "steps": 6}
        assert output.score == -index
        for name in ("index", "text", "token_ids", "logprobs", "weight_versions"):
            assert getattr(output, name) == getattr(one, name), name
        assert (output.finish_reason, output.stop_reason) == (one.finish_reason, one.stop_reason)
    if "stop" in options:
        assert result.outputs[0].finish_reason == "stop"


@pytest.mark.usefixtures("patched")
def test_an_aborted_search_has_all_its_outputs():
    params = SamplingParams(n=3, extra_args={"beam_width": 4})
    processor = OutputProcessor(tokenizer(), log_stats=False)
    request = engine_request(PROMPT, prepare_params(params))
    queue: list[Any] = []
    processor.add_request(request, "text", None, 0, type("Queue", (), {"put": queue.append}))
    assert processor.abort_requests(["A"], internal=False) == ["a"]
    [result] = queue
    assert [(output.index, output.finish_reason) for output in result.outputs] == [
        (index, "abort") for index in range(3)
    ]
    assert not processor.parent_requests
    assert not processor.has_unfinished_requests()
