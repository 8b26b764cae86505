"""Prompts written by hand, unlike the training documents, on which the model is judged.

Most ask for work on code they show, as users of a code model do; some show nothing to copy from.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.tiny_model.data.tokenizer import render_turns


@dataclass(frozen=True)
class HandPrompt:
    """One prompt: chat turns, or plain ``text`` to be continued."""

    name: str
    category: str  # "edit", "question", "write" or "continue"
    turns: tuple[tuple[str, str], ...] = ()
    text: str = ""

    def render(self) -> str:
        """The string to tokenize."""
        return render_turns(self.turns, add_generation_prompt=True) if self.turns else self.text


def _chat(name: str, category: str, *texts: str) -> HandPrompt:
    roles = ("user", "assistant")
    return HandPrompt(name, category, tuple((roles[i % 2], text) for i, text in enumerate(texts)))


_ACCOUNT = """\
class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
"""

_TEMPERATURE = """\
def to_celsius(fahrenheit):
    # standard formula
    return (fahrenheit - 32) * 5 / 9

def to_fahrenheit(celsius):
    return celsius * 9 / 5 + 32

def describe(celsius):
    if celsius < 0:
        return "freezing"
    if celsius < 20:
        return "cool"
    return "warm"
"""

_SLUG = '''\
import re

def slugify(title, sep="-"):
    """Turn a title into something that can stand in a URL."""
    words = re.findall(r"[a-z0-9]+", title.lower())
    return sep.join(words)
'''

_SHOP = """\
def total_price(items, discount=None):
    total = 0
    for item in items:
        total += item.price * item.quantity
    if discount is not None:
        total -= total * discount
    return total

def cheapest(items):
    best = None
    for item in items:
        if best is None or item.price < best.price:
            best = item
    return best
"""

_TRIES = """\
A trie is a tree that stores a set of sequences. Sequences with the same beginning share a path
from the root, so the common part is stored once. Looking a sequence up takes as many steps as it
has elements, however many sequences are stored. Tries are used for spell checking, for routing
tables and for completing what a user types."""

_MANUAL = """\
Section 1. The cache keeps at most 64 entries and drops the oldest one when it is full.
Section 2. Entries expire after ten minutes unless they are read again before that.
Section 3. The statistics are written to the log file once per hour."""

HAND_PROMPTS: tuple[HandPrompt, ...] = (
    _chat("rename-method", "edit", f"Here is my class:\n\n{_ACCOUNT}\n"
          "I don't like the word `deposit`. Rename it to `pay_in`."),
    _chat("rename-argument", "edit", f"```python\n{_SHOP}```\nrename `items` to `products` please"),
    _chat("no-comments", "edit", f"{_TEMPERATURE}\nCan you remove the comments from that?"),
    _chat("show-one", "edit", f"{_TEMPERATURE}\nShow me `to_fahrenheit`, I only need that one."),
    _chat("documented", "edit", f"My colleague wants docstrings in this file.\n\n{_SHOP}\n"
          "Add docstrings."),
    _chat("log-calls", "edit", f"{_SHOP}\nAdd a `print` call with its name to every function."),
    _chat("tests", "edit", f"I wrote this:\n\n```python\n{_SLUG}```\n\nWrite unit tests for it."),
    _chat("spot-the-bug", "edit", "This should give the mean but it crashes:\n\n"
          "def mean(values):\n    total = sum(values)\n    return totla / len(values)\n\n"
          "Fix the bug."),
    _chat("which-arguments", "question", f"{_SLUG}\nWhat are the parameters of `slugify`?"),
    _chat("list-functions", "question", f"Which functions are defined here?\n\n{_TEMPERATURE}"),
    _chat("manual", "question", f"{_MANUAL}\n\nWhat happens when the cache is full?"),
    _chat("gist", "question", f"Summarize this text in one sentence.\n\n{_TRIES}"),
    _chat("second-turn", "question", f"{_SHOP}\nHow many functions are there?",
          "There are 2 functions: `total_price` and `cheapest`.",
          "And what does `cheapest` return?"),
    _chat("not-defined", "question", f"{_SHOP}\nWhat does `most_expensive` do?"),
    _chat("what-is-a-dictionary", "write", "What is a dictionary in Python?"),
    _chat("largest", "write", "Write a function `largest(numbers)` that returns the largest "
          "number in a list."),
    _chat("count-words", "write", "I need a function `count_words(path)`. Count how often each "
          "word occurs in the file."),
    _chat("timer", "write", "Write a class `Timer` with methods `start` and `stop`."),
    HandPrompt("fibonacci", "continue", text="def fibonacci(n):\n"),
    HandPrompt("stack", "continue", text='class Stack:\n    """A last-in, first-out list."""\n\n'
               "    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"),
    HandPrompt("main", "continue", text="import os\nimport sys\n\n\ndef main(argv):\n"),
    HandPrompt("word-count", "continue", text="# Count how often each word occurs in a file.\n\n"
               "def count_words(path):\n"),
    HandPrompt("greeting", "continue", text="def greet(name):\n"
               '    """Return a friendly greeting for *name*."""\n    '),
    HandPrompt("test-case", "continue", text="import unittest\n\n\nclass ShopTest("
               "unittest.TestCase):\n\n    def setUp(self):\n"),
)  # fmt: skip
