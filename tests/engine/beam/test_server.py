"""``vllm serve`` with beam search, over real HTTP."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.engine.beam.cases import prompt
from tests.engine.beam.oracle import Case, constrained_search, search
from tests.engine.hostile import MIXED as ITEMS
from tests.engine.prompts import tokenizer
from tests.engine.serving import MODEL_NAME
from tests.extras.items.unit.catalogues import PlainTrie
from vllm_trie.lab.tiny_model import model_path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(full_server):
    return full_server.client()


def completion(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    defaults = {"prompt": list(prompt(4, 40)), "max_tokens": 16, "temperature": 0}
    return client.completions.create(
        model=MODEL_NAME, extra_body=extra or {}, **{**defaults, **options}
    )


def chat(client: openai.OpenAI, extra: dict[str, Any] | None = None, **options: Any) -> Any:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    options = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, **options}
    return client.chat.completions.create(temperature=0, extra_body=extra or {}, **options)


def expected_texts(case: Case) -> list[str]:
    return [
        tokenizer().decode(hypothesis.token_ids, skip_special_tokens=True)
        for hypothesis in search(str(model_path()), case)
    ]


def test_completions(client):
    result = completion(client, {"use_beam_search": True, "length_penalty": 0.6}, n=4)
    case = Case(prompt(4, 40), 4, length_penalty=0.6)
    assert [choice.text for choice in result.choices] == expected_texts(case)
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    expected = search(str(model_path()), case)
    assert result.usage.completion_tokens == sum(
        len(hypothesis.token_ids) for hypothesis in expected
    )
    scores = [beam["score"] for beam in result.beams]
    assert scores == pytest.approx([hypothesis.score for hypothesis in expected], abs=1e-4)
    assert not hasattr(completion(client), "beams")


@pytest.mark.parametrize("use_beam_search", [False, True])
def test_items_of_a_catalogue(client, use_beam_search):
    """The stop reason is the id of the item."""
    extra: dict[str, Any] = {"vllm_xargs": {"items": "mixed", "items_end": "eos"}}
    if use_beam_search:
        extra["use_beam_search"] = True
    else:
        extra["vllm_xargs"]["beam_width"] = 8
    result = completion(client, extra, n=8)
    plain = PlainTrie(ITEMS)
    expected = constrained_search(
        str(model_path()), prompt(4, 40), 8, 5, lambda path: plain.allowed(path, 0), 0
    )
    ends = [(choice.finish_reason, choice.stop_reason) for choice in result.choices]
    assert ends == [("stop", ITEMS[tuple(hypothesis.token_ids[:-1])]) for hypothesis in expected]
    assert [beam["item"] for beam in result.beams] == [
        choice.stop_reason for choice in result.choices
    ]


def test_items_without_text(client):
    """Business rules, ids, and no text where nobody wants it."""
    denied = [list(tokens[:1]) for tokens in list(ITEMS)[:50]]
    xargs = {"items": "mixed", "beam_width": 6, "detokenize": 0}
    xargs["deny_prefixes"] = json.dumps(denied)
    extra = {"vllm_xargs": xargs, "return_token_ids": True}
    result = completion(client, extra, n=6)
    assert len(result.choices) == 6
    for choice in result.choices:
        tokens = tuple(token for token in choice.token_ids if token != 0)
        assert choice.stop_reason == ITEMS[tokens]
        assert list(tokens[:1]) not in denied
        assert choice.text == ""


def test_several_prompts_at_once(client):
    prompts = [list(prompt(number, 30)) for number in range(3)]
    result = completion(client, {"use_beam_search": True}, n=3, prompt=prompts)
    texts = [text for token_ids in prompts for text in expected_texts(Case(tuple(token_ids), 3))]
    assert [choice.text for choice in result.choices] == texts
    assert len(result.beams) == len(texts)


def test_logprobs(client):
    result = completion(client, {"use_beam_search": True}, n=3, logprobs=2)
    for choice in result.choices:
        assert len(choice.logprobs.token_logprobs) == 16
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)


def test_chat(client):
    result = chat(client, {"use_beam_search": True}, n=3, logprobs=True, top_logprobs=2)
    texts = [choice.message.content for choice in result.choices]
    assert len(set(texts)) == 3
    assert all(len(choice.logprobs.content) == 12 for choice in result.choices)
    wider = chat(client, {"vllm_xargs": {"beam_width": 3}}, n=2)
    assert [choice.message.content for choice in wider.choices] == texts[:2]
    assert len(result.beams) == 3
    assert wider.beams == [pytest.approx(beam, abs=1e-4) for beam in result.beams[:2]]


def test_stop_string(client):
    free = completion(client, {"use_beam_search": True, "length_penalty": 0.0}, n=4)
    stop = free.choices[0].text[3:6]
    result = completion(client, {"use_beam_search": True, "length_penalty": 0.0}, n=4, stop=stop)
    assert any(choice.finish_reason == "stop" for choice in result.choices)
    assert not any(stop in choice.text for choice in result.choices)


@pytest.mark.parametrize("call", [completion, chat])
def test_structured_outputs(client, call):
    one = {"type": "object", "properties": {"a": {"enum": [1, 20, 300]}}, "required": ["a"]}
    schema = {**one, "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    native = {"use_beam_search": True, "response_format": response_format}
    # Short ones win: long ones have spaces where the grammar allows them.
    result = call(client, {**native, "length_penalty": 0.0}, n=4, max_tokens=40)
    for choice in result.choices:
        text = choice.text if call is completion else choice.message.content
        assert text.lstrip().startswith("{")
        if choice.finish_reason == "stop":
            assert json.loads(text)["a"] in (1, 20, 300)
    assert any(choice.finish_reason == "stop" for choice in result.choices)
    grammar = {"vllm_xargs": {"beam_width": 4}, "structured_outputs": {"regex": "[a-c]{2,5}"}}
    for choice in call(client, grammar, n=4).choices:
        text = choice.text if call is completion else choice.message.content
        assert re.fullmatch("[a-c]{2,5}", text)


ITEM = next(item for item in ITEMS if len(item) > 2 and tokenizer().decode(item).isascii())
FEW = {
    "no item": {"items": "mixed", "allow_items": [-1]},
    "one item": {"items": "mixed", "allow_items": [ITEMS[ITEM]]},
    "grammar": {"structured_outputs": {"choice": ["a", "b"]}},
    "tokens": {"allowed_token_ids": [5], "ignore_eos": True},
}
"""Searches that find fewer than 4 hypotheses; `vllm_xargs` of the first two."""


@pytest.mark.parametrize("call", [completion, chat])
@pytest.mark.parametrize("kind", FEW)
def test_searches_that_find_fewer_hypotheses(client, call, kind):
    """What is missing is empty: JSON has no infinite score."""
    xargs = {"beam_width": 4, "beam_trace": 1}
    options = {**FEW[kind], "vllm_xargs": xargs}
    if "items" in options:
        options = {"vllm_xargs": {**xargs, **FEW[kind]}}
    logprobs = {"logprobs": 0} if call is completion else {"logprobs": True, "top_logprobs": 0}
    result = call(client, options, n=4, **logprobs)
    texts = [c.text if call is completion else c.message.content for c in result.choices]
    num_missing = {"no item": 4, "one item": 3, "grammar": 2, "tokens": 3}[kind]
    scores = [beam["score"] for beam in result.beams]
    assert texts[-num_missing:] == [""] * num_missing
    assert scores[-num_missing:] == [None] * num_missing
    assert all(texts[:-num_missing])
    assert None not in scores[:-num_missing]
    assert ["trace" in beam for beam in result.beams] == [True, False, False, False]
    if kind == "one item":
        assert texts[0] == tokenizer().decode(ITEM)


BAD = [
    ({"use_beam_search": True}, {"n": 0}, "beam_width"),
    ({"use_beam_search": True}, {"n": 33}, "max_num_seqs=32"),
    ({"use_beam_search": True}, {"n": "many"}, "integer"),
    ({"use_beam_search": True, "length_penalty": "long"}, {"n": 2}, "length_penalty"),
    ({"use_beam_search": True}, {"n": 2, "logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"use_beam_search": "perhaps"}, {"n": 2}, "boolean"),
    ({"use_beam_search": True, "structured_outputs": {"regex": "("}}, {"n": 2}, "regex|grammar"),
    ({"use_beam_search": True, "vllm_xargs": {"lenght_penalty": 2}}, {"n": 2}, "length_penalty"),
    ({"vllm_xargs": {"beam_width": 4}}, {"n": 5}, "n must be at most beam_width=4"),
]
"""What the tests of the offline engine refuse besides takes the same way."""


@pytest.mark.parametrize("call", [completion, chat])
def test_bad_requests_get_400_and_leave_the_server_alive(client, call):
    for extra, options, message in BAD:
        with pytest.raises(openai.BadRequestError, match=message):
            call(client, extra, **options)
    assert completion(client, {"use_beam_search": True}, n=2).choices


@pytest.mark.parametrize("call", [completion, chat])
@pytest.mark.parametrize("extra", [{"use_beam_search": True}, {"vllm_xargs": {"beam_width": 2}}])
def test_streaming_gets_400(client, call, extra):
    with pytest.raises(openai.BadRequestError, match=r"(?i)stream"):
        for _ in call(client, extra, n=2, stream=True):
            pass
    streamed = "".join(chunk.choices[0].text for chunk in completion(client, stream=True))
    assert streamed == completion(client).choices[0].text


def test_a_batch_of_chats(client):
    def ask(**extra: Any) -> Any:
        messages = [[{"role": "user", "content": "def add(a, b):"}]] * 2
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
        path = "/chat/completions/batch"
        return client.post(path, cast_to=ChatCompletion, body={**body, **extra})

    option = {"vllm_xargs": {"beam_width": 3}}
    alone, together = chat(client, option, n=1), ask(**option)
    texts = [choice.message.content for choice in together.choices]
    assert texts == [alone.choices[0].message.content] * 2
    assert together.beams == [pytest.approx(alone.beams[0], abs=1e-4)] * 2
    for misplaced in ({"speculation": False}, {"beam_width": 4}):
        with pytest.raises(openai.BadRequestError, match="put it into 'vllm_xargs'"):
            ask(**misplaced)


def test_responses_refuse_options_outside_of_vllm_xargs(client):
    def respond(**extra: Any) -> Any:
        return client.responses.create(
            model=MODEL_NAME, input="def add(a, b):", max_output_tokens=8, extra_body=extra
        )

    for extra in ({"speculation": False}, {"vllm_xargs": {"beam_width": 2}, "normalize": "valid"}):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="put it into 'vllm_xargs'"):
                respond(**extra, stream=stream)
    assert respond(vllm_xargs={"speculation": False}, length_penalty=2.0).output_text
    assert respond(vllm_xargs={"beam_width": 4, **FEW["no item"]}).output_text == ""


def test_a_client_that_goes_away(client, full_server):
    ended = full_server.metrics().get("vllm:trie_beam_searches_total", 0)
    impatient = client.with_options(timeout=0.3)
    for _ in range(3):
        with pytest.raises(openai.APITimeoutError):
            completion(impatient, {"use_beam_search": True}, n=32, max_tokens=400)
    # Its rows are gone: the widest search fits again, and waits for none to end.
    result = completion(client, {"use_beam_search": True}, n=32, max_tokens=4)
    assert len(result.choices) == 32
    assert full_server.metrics()["vllm:trie_beam_searches_total"] == ended + 1
