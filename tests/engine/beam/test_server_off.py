"""A server whose native beam search is off: vLLM's own behaviour, streams included."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engine.serving import MODEL_NAME, Server, running

pytestmark = pytest.mark.slow

QUESTION = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "def add(a, b):"}],
    "max_tokens": 6,
    "temperature": 0,
    "n": 2,
    "use_beam_search": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    off = ["--additional-config", '{"vllm_trie": {"beam_search": false}}']
    with running(tmp_path_factory.mktemp("server") / "log", *off) as server:
        yield server


def test_a_chat_is_streamed(server: Server) -> None:
    whole = server.http.post("/v1/chat/completions", json=QUESTION).json()
    reply = server.http.post("/v1/chat/completions", json={**QUESTION, "stream": True})
    assert reply.status_code == 200, reply.text
    texts = {0: "", 1: ""}
    for line in reply.text.splitlines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            for choice in json.loads(data)["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    expected = {each["index"]: each["message"]["content"] for each in whole["choices"]}
    assert all(expected.values())
    assert texts == expected


def test_a_completion_gets_vllms_own_refusal(server: Server) -> None:
    body = {**QUESTION, "prompt": "def add(a, b):", "stream": True}
    del body["messages"]
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert "not currently supported with beam search" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_beam_width_is_refused(server: Server, stream: bool) -> None:
    body = {**QUESTION, "vllm_xargs": {"beam_width": 2}, "stream": stream}
    del body["use_beam_search"]
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert "beam" in reply.json()["error"]["message"]
