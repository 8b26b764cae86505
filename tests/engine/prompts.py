"""Prompts for the engine tests: functions of the standard library with something to do to them."""

from __future__ import annotations

import calendar
import fnmatch
import fractions
import functools
import heapq
import inspect
import queue
import shlex
import textwrap

from transformers import AutoTokenizer

from vllm_trie.lab.tiny_model import model_path

_SUBJECTS = (
    heapq.nlargest,
    heapq.nsmallest,
    heapq.merge,
    textwrap.wrap,
    textwrap.indent,
    textwrap.shorten,
    calendar.monthrange,
    calendar.timegm,
    fnmatch.filter,
    queue.Queue.put,
    queue.Queue.join,
    fractions.Fraction.limit_denominator,
    shlex.join,
)
_REQUESTS = (
    "repeat the code",
    "rename `self` to `this`",
    "add docstrings to the functions",
    "write tests for this code",
    "what does this code do?",
)


@functools.cache
def tokenizer():
    """The shipped model's tokenizer."""
    return AutoTokenizer.from_pretrained(str(model_path()))


@functools.cache
def texts() -> tuple[str, ...]:
    """Prompts as text: chat requests about code, plain code to go on with, a few words."""
    chats = []
    for index, subject in enumerate(_SUBJECTS):
        code = textwrap.dedent(inspect.getsource(subject))[:900]
        for request in (_REQUESTS[index % 5], _REQUESTS[(index + 2) % 5]):
            message = [{"role": "user", "content": f"{code}\n\n{request}"}]
            chats.append(
                tokenizer().apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            )
    plain = [textwrap.dedent(inspect.getsource(subject))[:120] for subject in _SUBJECTS[::3]]
    return (*chats, *plain, "import", "def main():\n")


@functools.cache
def prompts(count: int | None = None) -> list[dict[str, list[int]]]:
    """The first `count` prompts as vLLM takes them, `{"prompt_token_ids": [...]}`."""
    return [{"prompt_token_ids": tokenizer().encode(text)} for text in texts()[:count]]
