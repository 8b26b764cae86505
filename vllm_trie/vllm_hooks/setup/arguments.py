"""Command line: the methods as choices of ``--spec-method``, and ``--speculative-model``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from vllm_trie.drafters import available_methods
from vllm_trie.vllm_hooks.setup import method_names

ALIAS = "--speculative-model"


def wrap_add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the plugin's methods to each parser that vLLM fills."""

    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        add_methods(parser)
        return parser

    return add_cli_args


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


def _checked(convert: Callable[[str], Any], known: Sequence[Any]) -> Callable[[str], Any]:
    """Make a type of ``--spec-method`` that names the method meant, before argparse lists all."""

    def checked(text: str) -> Any:
        value = convert(text)
        if method := method_names.meant(value, known):
            raise argparse.ArgumentTypeError(method_names.question(value, method))
        return value

    return checked
