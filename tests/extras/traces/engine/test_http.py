"""Traces of requests over HTTP."""

from __future__ import annotations

import itertools

import openai
import pytest
from transformers import AutoTokenizer

from tests.engine.chats import CHATS, chat, complete, joined
from tests.engine.prompts import texts
from vllm_trie.extras.traces.trace_file import Trace, read_trace
from vllm_trie.lab.tiny_model import model_path

pytestmark = pytest.mark.slow


def ask_for_traces(client: openai.OpenAI) -> dict[str, tuple[str, str]]:
    """Return id and text of each reply."""
    asked = {"extra_body": {"vllm_xargs": {"speculation_trace": True}}}
    prompt, messages = texts()[1], CHATS[0]
    whole = complete(client, prompt, **asked)
    answer = chat(client, messages, **asked)
    replies = {
        "whole": (whole.id, whole.choices[0].text),
        "chat": (answer.id, answer.choices[0].message.content),
    }
    for name, chunks, text_of in (
        ("streamed", complete(client, prompt, stream=True, **asked), lambda c: c.text),
        ("chat streamed", chat(client, messages, stream=True, **asked), lambda c: c.delta.content),
    ):
        some = list(chunks)
        replies[name] = some[0].id, joined(some, text_of)[0]
    complete(client, prompt)  # the worker ends a trace in the step after its request's last
    return replies


def text_of(trace: Trace) -> str:
    decode = AutoTokenizer.from_pretrained(model_path()).decode
    tokens = itertools.chain.from_iterable(step.tokens for step in trace.steps)
    return decode(list(tokens), skip_special_tokens=True)


def test_traces(full_server):
    folder = full_server.log.with_name("traces")
    before = {*folder.iterdir()}
    replies = ask_for_traces(full_server.client())
    assert len({request_id for request_id, _ in replies.values()}) == 4
    paths = {path.name: path for path in {*folder.iterdir()} - before}
    assert len(paths) == 4
    for request_id, text in replies.values():
        (path,) = (path for name, path in paths.items() if request_id in name)
        assert path.stat().st_mode & 0o777 == 0o600
        trace = read_trace(path)
        assert (trace.end, trace.header.method) == ("complete", "ngram_trie")
        assert text_of(trace) == text
        assert any(step.accepted for step in trace.steps)
