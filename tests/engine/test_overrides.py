"""Overrides of vLLM's methods, each of which has an entry in the table of patches."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import vllm_trie
from vllm_trie.hooks import ledger


def subclasses() -> Iterator[tuple[type, list[type]]]:
    """Yield the package's classes that have bases of vLLM's, and these bases."""
    for described in pkgutil.walk_packages(vllm_trie.__path__, "vllm_trie."):
        module = importlib.import_module(described.name)
        for _, ours in inspect.getmembers(module, inspect.isclass):
            theirs = [base for base in ours.__mro__ if base.__module__.startswith("vllm.")]
            if ours.__module__ == described.name and theirs:
                yield ours, theirs


def test_overrides_are_in_the_table():
    targets = {entry.target for entry in ledger.entries()}
    overrides, missing = 0, set()
    for ours, theirs in subclasses():
        for base in ours.__mro__[: ours.__mro__.index(theirs[0])]:
            for name in vars(base).keys() & {name for one in theirs for name in vars(one)}:
                if name == "__call__" or not name.startswith(("__", "_abc_")):
                    overrides += 1
                    if not {f"{one.__module__}:{one.__name__}.{name}" for one in theirs} & targets:
                        missing.add(f"{base.__module__}:{base.__name__}.{name}")
    assert missing == set()
    assert overrides > 60
