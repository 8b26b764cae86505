"""Requests to servers through OpenAI's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

from tests.engine.serving import MODEL_NAME

SOURCE = """def count_words(lines):
    counts = {}
    for line in lines:
        for word in line.split():
            counts[word] = counts.get(word, 0) + 1
    return counts
"""
CHATS = [
    [{"role": "user", "content": f"{SOURCE}\nrepeat the code"}],
    [{"role": "user", "content": f"{SOURCE}\nwhat does this code do?"}],
]


def complete(client: openai.OpenAI, prompt: str | list[str] | list[int], **options: Any) -> Any:
    settings = {"max_tokens": 60, "temperature": 0.0, **options}
    return client.completions.create(model=MODEL_NAME, prompt=prompt, **settings)


def chat(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    settings = {"max_tokens": 80, "temperature": 0.0, **options}
    return client.chat.completions.create(model=MODEL_NAME, messages=messages, **settings)


def joined(chunks: Any, text_of: Callable[[Any], str | None]) -> tuple[str, str | None, int]:
    """Text, reason to end and number of chunks of a stream."""
    text, reason, count = "", None, 0
    for chunk in chunks:
        for choice in chunk.choices:
            text += text_of(choice) or ""
            reason = choice.finish_reason or reason
            count += 1
    return text, reason, count
