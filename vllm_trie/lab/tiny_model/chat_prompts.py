"""The demo's prompts: requests to a code model about code that the shipped model has not seen.

The code comes from modules of the standard library that were held out of training, or was written
for this file.
"""

from __future__ import annotations

import colorsys
import fnmatch
import inspect
import sched
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple


class ChatPrompt(NamedTuple):
    """One message of a user."""

    name: str
    message: str


INVENTORY = """\
class Inventory:
    def __init__(self, name):
        self.name = name
        self.items = {}

    def add(self, item, amount=1):
        self.items[item] = self.items.get(item, 0) + amount

    def remove(self, item, amount=1):
        if self.items.get(item, 0) < amount:
            raise ValueError("not enough of " + item)
        self.items[item] -= amount

    def total(self):
        return sum(self.items.values())
"""

_INVOICE = """\
def net_price(lines):
    total = 0
    for line in lines:
        total += line.price * line.quantity
    return total

def gross_price(lines, tax=0.2):
    total = net_price(lines)
    return total + totla * tax
"""

_HANDBOOK = """\
[1] Requests are answered in the order in which they arrive.
[2] A request that waits longer than thirty seconds is dropped, and the client gets error 503.
[3] The cache keeps the last 512 answers; the oldest answer is dropped when the cache is full.
[4] All times in the log file are written in UTC."""


def _source(*objects: Callable[..., Any]) -> str:
    return "\n".join(textwrap.dedent(inspect.getsource(item)) for item in objects)


def chat_prompts() -> list[ChatPrompt]:
    """Return the prompts; the first answers repeat much of their context, the last ones little."""
    return [
        ChatPrompt(
            "rename attribute",
            f"Here is my class:\n\n{INVENTORY}\nRename `items` to `stock`.",
        ),
        ChatPrompt(
            "add log calls",
            f"{_source(sched.scheduler.enter, sched.scheduler.cancel)}\n"
            "Add a `print` call with its name to every function.",
        ),
        ChatPrompt(
            "show one function",
            f"{_source(colorsys.rgb_to_yiq, colorsys.yiq_to_rgb, colorsys.rgb_to_hsv)}\n"
            "Show me `rgb_to_hsv`.",
        ),
        ChatPrompt("fix a bug", f"{_INVOICE}\nThis does not work, fix it."),
        ChatPrompt("add docstrings", f"{INVENTORY}\nAdd docstrings."),
        ChatPrompt("summarize code", f"{_source(fnmatch.filter)}\nSummarize the code."),
        ChatPrompt(
            "answer from a text",
            f"{_HANDBOOK}\n\nWhat happens when the cache is full?",
        ),
        ChatPrompt(
            "write new code",
            "Write a function `largest(numbers)` that returns the largest number in a list.",
        ),
    ]


def chat_tokens(tokenizer: Any, message: str) -> list[int]:
    """Return the token ids of a one-turn chat, up to where the answer begins.

    Args:
        tokenizer: Hugging Face's, with a chat template.
        message: The user's turn.
    """
    token_ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
    )
    return token_ids


def prompt_tokens(tokenizer: Any, message: str) -> list[int]:
    """Return the token ids of a chat, or of the text alone without a chat template."""
    encoded = chat_tokens if tokenizer.chat_template else type(tokenizer).encode
    return encoded(tokenizer, message)
