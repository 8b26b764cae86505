"""A server whose native beam search is off: vLLM's own behaviour, streams included."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.engine.serving import MODEL_NAME, Server

OPTIONS = ["--additional-config", '{"vllm_trie": {"beam_search": false}}']
QUESTION: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 6, "temperature": 0, "n": 2}
CHAT = {**QUESTION, "messages": [{"role": "user", "content": "def add(a, b):"}]}
NATIVE, WIDTH = {"use_beam_search": True}, {"vllm_xargs": {"beam_width": 2}}


def ask_for_beams(server: Server) -> dict[str, httpx.Response]:
    """Return the replies to beam searches of all kinds."""
    completion = {**QUESTION, **NATIVE, "prompt": "def add(a, b):", "stream": True}
    chat = "/v1/chat/completions"
    return {
        "chat": server.http.post(chat, json={**CHAT, **NATIVE}),
        "streamed chat": server.http.post(chat, json={**CHAT, **NATIVE, "stream": True}),
        "streamed completion": server.http.post("/v1/completions", json=completion),
        "width": server.http.post(chat, json={**CHAT, **WIDTH}),
        "streamed width": server.http.post(chat, json={**CHAT, **WIDTH, "stream": True}),
    }


def check_beam_replies(replies: dict[str, httpx.Response]) -> None:
    """Check that vLLM streams a chat and refuses the rest in its own words."""
    streamed = replies["streamed chat"]
    assert streamed.status_code == 200, streamed.text
    texts = {0: "", 1: ""}
    for line in streamed.text.splitlines():
        data = line.removeprefix("data: ")
        if data and data != "[DONE]":
            for choice in json.loads(data)["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    whole = replies["chat"].json()["choices"]
    expected = {answer["index"]: answer["message"]["content"] for answer in whole}
    assert all(expected.values())
    assert texts == expected

    for kind, message in (
        ("streamed completion", "not currently supported with beam search"),
        ("width", "beam"),
        ("streamed width", "beam"),
    ):
        assert replies[kind].status_code == 400, kind
        assert message in replies[kind].json()["error"]["message"], kind
