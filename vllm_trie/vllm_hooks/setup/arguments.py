"""Command line: the methods as choices of ``--spec-method``, and ``--speculative-model``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from vllm_trie.drafters import available_methods
from vllm_trie.vllm_hooks.setup import method_names as misspelled

ALIAS = "--speculative-model"


def _checked(convert: Callable[[str], Any], known: Sequence[Any]) -> Callable[[str], Any]:
    """A type of ``--spec-method`` that says which method was meant, before argparse lists all."""

    def checked(text: str) -> Any:
        value = convert(text)
        if method := misspelled.meant(value, known):
            raise argparse.ArgumentTypeError(misspelled.question(value, method))
        return value

    return checked


def add_methods(parser: Any) -> None:
    """Teach vLLM's argument parser the plugin's methods; may be called twice on one parser.

    ``--speculative-model`` becomes another name of ``--spec-model``.
    """
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            new = [method for method in available_methods() if method not in action.choices]
            action.choices = [*action.choices, *new]
            if new:
                action.type = _checked(action.type or str, action.choices)
    if not any(ALIAS in action.option_strings for action in parser._actions):
        parser.add_argument(
            ALIAS,
            dest="spec_model",
            default=argparse.SUPPRESS,
            help="Another name of --spec-model. Also takes a method of vllm-trie: "
            + ", ".join(available_methods()),
        )
