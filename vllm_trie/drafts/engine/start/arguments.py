"""Command line: the methods as choices of ``--spec-method``, and ``--speculative-model``.

Misspelled names that look more like one of vLLM's methods, or like none, are left to vLLM's own
message.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from vllm_trie.drafts import available_methods
from vllm_trie.hooks.ledger.record import PLUGGABLE, Symbols
from vllm_trie.refusal import RefusedError

ALIAS = "--speculative-model"
_SIMILAR = 0.6
_SIMILAR_MODEL = 0.85
"""A draft model's name may resemble a method's without being meant for it."""


_arguments = Symbols("engine.arg_utils:EngineArgs.", PLUGGABLE)


@_arguments.wraps("add_cli_args", "the same, where the plugin steps aside", scope="aside")
@_arguments.wraps(
    "add_cli_args", "the methods as choices of --spec-method, --speculative-model as an alias"
)
def add_cli_args(original: Callable[..., Any], parser: object) -> Any:
    parser = original(parser)
    add_methods(parser)
    return parser


def add_methods(parser: Any) -> None:
    """Teach vLLM's argument parser the plugin's methods; may be called twice on one parser.

    ``--speculative-model`` becomes another name of ``--spec-model``.
    """
    for action in parser._actions:
        if "--spec-method" in action.option_strings and action.choices is not None:
            new = [method for method in available_methods() if method not in action.choices]
            action.choices = [*action.choices, *new]
    if not any(ALIAS in action.option_strings for action in parser._actions):
        parser.add_argument(
            ALIAS,
            dest="spec_model",
            default=argparse.SUPPRESS,
            help="Another name of --spec-model. Also takes a method of vllm-trie: "
            + ", ".join(available_methods()),
        )


def meant(name: object, methods: Iterable[Any] = (), similarity: float = _SIMILAR) -> str:
    """Return the method of vllm-trie that an unknown name probably stands for.

    Args:
        name: What was asked for.
        methods: What vLLM knows.
        similarity: Smallest ratio of :class:`difflib.SequenceMatcher`.

    Returns:
        The method; empty for names that are methods, or nearest to another or to none.
    """
    ours = available_methods()
    theirs = [one for one in methods if isinstance(one, str) and one not in ours]
    if not isinstance(name, str) or name in ours or name in theirs:
        return ""
    plain = name.lower().replace("-", "_")
    nearest = difflib.get_close_matches(plain, [*ours, *theirs], n=1, cutoff=similarity)
    return nearest[0] if nearest and nearest[0] in ours else ""


def _question(name: str, method: str) -> str:
    """Return the message for the user."""
    return (
        f"{name!r} is unknown; did you mean {method!r}? The methods of vllm-trie are "
        f"{', '.join(available_methods())}"
    )


def refuse_misspelled_method(engine_args: Any) -> None:
    """Refuse engine arguments that misspell a method of vllm-trie.

    Raises:
        RefusedError: Naming the method that was probably meant, and all others.
    """
    speculative = engine_args.speculative_config or {}
    if not isinstance(speculative, Mapping):
        speculative = {}  # vLLM has its own message for it
    methods = list(filter(None, (engine_args.spec_method, speculative.get("method"))))
    for name in methods:
        if method := meant(name, vllm_methods()):
            raise RefusedError(f"speculative method {_question(name, method)}")
    if methods:
        return
    for name in filter(None, (engine_args.spec_model, speculative.get("model"))):
        method = meant(name, similarity=_SIMILAR_MODEL)
        if method and not Path(name).exists():
            raise RefusedError(f"speculative model {_question(name, method)}")


def vllm_methods() -> tuple[Any, ...]:
    """Return the installed vLLM's own methods; empty if it keeps them elsewhere."""
    from vllm.config import speculative

    return get_args(getattr(speculative, "SpeculativeMethod", None))
