"""Streams that a parser reads get each token as an output of its own, others do not."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import LogprobsLists

from tests.engine.prompts import tokenizer
from tests.unit.hooks.frontend import engine_request, output_hooks
from vllm_trie.drafts.engine.frontend import token_streams
from vllm_trie.drafts.engine.frontend.token_streams import MOST_WAITING, TokenCollector
from vllm_trie.lab.tiny_model import model_path

PROMPT = tokenizer().encode("def main():\n")
TEXT = "<think>\nso I look\n</think>\n\nI see <to> it\n"
ANSWER = tokenizer().encode("    return 'naïve café'\n", add_special_tokens=False)
CUTS = (1, 5, 6, 9, len(ANSWER))
"""Where the engine's messages end."""


@pytest.fixture
def patched():
    with output_hooks("speculation"):
        yield


@functools.cache
def thinking_tokenizer() -> Any:
    """The model's, with the tokens that parsers of reasoning look for."""
    tokens = AutoTokenizer.from_pretrained(str(model_path()))
    tokens.add_tokens(["<think>", "</think>"])
    return tokens


def messages(cuts: tuple[int, ...], answer: list[int]) -> list[EngineCoreOutput]:
    """An answer in messages of several tokens, with logprobs."""
    outputs = []
    for start, end in zip((0, *cuts), cuts, strict=False):
        token_ids = np.array([[token, 0] for token in answer[start:end]], dtype=np.int32)
        logprobs = LogprobsLists(
            token_ids, -token_ids.astype(np.float32), np.arange(start, end, dtype=np.int32)
        )
        is_last = end == len(answer)
        outputs.append(
            EngineCoreOutput(
                "a",
                answer[start:end],
                logprobs,
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
        )
    return outputs


def stream(
    splits: bool, cuts: tuple[int, ...] = CUTS, answer: list[int] = ANSWER, **params: Any
) -> tuple[list[Any], IterationStats]:
    """The outputs that a client gets who reads after each message, and the statistics."""
    kind = RequestOutputKind.DELTA
    settings = SamplingParams(output_kind=kind, logprobs=1, max_tokens=len(answer), **params)
    request = engine_request(PROMPT, settings)
    processor, stats = OutputProcessor(thinking_tokenizer(), log_stats=True), IterationStats()
    before = token_streams._splits.set(splits)
    queue = TokenCollector(kind, "a")
    token_streams._splits.reset(before)
    processor.add_request(request, None, queue=queue)
    outputs = []
    for i, message in enumerate(messages(cuts, answer)):
        processor.process_outputs([message], float(i), stats)
        while (output := queue.get_nowait()) is not None:
            outputs.append(output)
    assert not processor.request_states
    return outputs, stats


def shown(outputs: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (o.outputs[0].text, list(o.outputs[0].token_ids), o.outputs[0].logprobs, o.finished)
        for o in outputs
    ]


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("params", [{}, {"stop": ["ïve c"]}], ids=["whole", "stop string"])
def test_a_stream_that_is_parsed_is_that_of_plain_decoding(params):
    one_by_one = tuple(range(1, len(ANSWER) + 1))
    plain, _ = stream(False, one_by_one, **params)
    assert len(plain) > 8
    assert shown(stream(True, **params)[0]) == shown(plain)
    merged, _ = stream(False, **params)
    assert len(merged) <= len(CUTS)


@pytest.mark.usefixtures("patched")
def test_what_a_parser_reads_is_that_of_plain_decoding():
    answer = thinking_tokenizer().encode(TEXT, add_special_tokens=False)
    cuts = (*range(3, len(answer), 3), len(answer))
    plain = parsed(stream(False, tuple(range(1, len(answer) + 1)), answer)[0])
    assert plain == ("\nso I look\n", "\n\nI see <to> it\n")
    assert parsed(stream(True, cuts, answer)[0]) == plain
    # vLLM's parser takes a tag for text if its message goes on behind it.
    assert parsed(stream(False, cuts, answer)[0]) != plain


def parsed(outputs: list[Any]) -> tuple[str, str]:
    """The reasoning and the text that a client gets."""
    names = {"tool_parser_name": "hermes", "reasoning_parser_name": "deepseek_r1"}
    parser = ParserManager.get_parser(**names, enable_auto_tools=True)(thinking_tokenizer(), [])
    request = ChatCompletionRequest(messages=[])
    reasoning = content = ""
    for output in outputs:
        out = output.outputs[0]
        delta = parser.parse_delta(
            delta_text=out.text,
            delta_token_ids=list(out.token_ids),
            request=request,
            prompt_token_ids=PROMPT,
            finished=out.finish_reason is not None,
        )
        reasoning += (delta and delta.reasoning) or ""
        content += (delta and delta.content) or ""
    return reasoning, content


@pytest.mark.usefixtures("patched")
def test_statistics_count_messages(monkeypatch):
    monkeypatch.setattr(IterationStats, "_time_since", lambda *_: 0.0)
    split, merged = stream(True)[1], stream(False)[1]
    for name in (
        "num_generation_tokens",
        "inter_token_latencies_iter",
        "time_to_first_tokens_iter",
    ):
        assert getattr(split, name) == getattr(merged, name), name
    assert split.num_generation_tokens == len(ANSWER)


@pytest.mark.usefixtures("patched")
def test_outputs_for_a_client_that_does_not_read_become_one(monkeypatch):
    monkeypatch.setattr(token_streams, "MOST_WAITING", 3)
    assert MOST_WAITING > 3
    before = token_streams._splits.set(True)
    queue = TokenCollector(RequestOutputKind.DELTA, "a")
    token_streams._splits.reset(before)
    outputs, _ = stream(True)
    expected = "".join(output.outputs[0].text for output in outputs)
    for output in outputs:
        queue.put(output)
    waiting = [asyncio.run(queue.get()) for _ in range(4)]
    assert queue.get_nowait() is None
    assert waiting[-1].finished
    assert "".join(output.outputs[0].text for output in waiting) == expected


def test_an_error_comes_first():
    before = token_streams._splits.set(True)
    queue = TokenCollector(RequestOutputKind.DELTA, "a")
    token_streams._splits.reset(before)
    for output in ("first", "second"):
        queue.put(output)
    queue.put(ValueError("the engine is dead"))
    with pytest.raises(ValueError, match="dead"):
        queue.get_nowait()


@pytest.mark.parametrize(
    ("has_parser", "has_drafts", "splits"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_requests_are_split_where_a_parser_reads_drafted_tokens(
    monkeypatch, has_parser, has_drafts, splits
):
    monkeypatch.setattr(token_streams.config, "read", lambda _: object() if has_drafts else None)
    parser = object() if has_parser else None
    engine_client = SimpleNamespace(vllm_config=None)

    async def results() -> Any:
        for _ in range(2):
            yield TokenCollector(RequestOutputKind.DELTA, "a").splits

    async def answered(serving: object, request: Any) -> Any:
        """Return a stream, or what a task in the background does."""
        return results() if request.stream else [splits async for splits in results()]

    async def ask(name: str, stream: bool) -> list[bool]:
        serving = SimpleNamespace(engine_client=engine_client, **{name: parser})
        request = SimpleNamespace(stream=stream)
        answer = await token_streams._token_by_token(answered, serving, request)
        assert not token_streams._splits.get()
        if not stream:
            return answer
        seen = [(splits, token_streams._splits.get()) async for splits in answer]
        assert not any(outside for _, outside in seen)
        return [inside for inside, _ in seen]

    for name in ("parser_cls", "parser"):
        assert asyncio.run(ask(name, stream=True)) == [splits] * 2
        assert asyncio.run(ask(name, stream=False)) == [False] * 2
