"""Misspelled names of the plugin's methods.

Names that look more like one of vLLM's methods, or like none, are left to vLLM's own message.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from vllm_trie.drafters import available_methods

_SIMILAR = 0.6
_SIMILAR_MODEL = 0.85
"""A draft model's name may resemble a method's without being meant for it."""


def meant(name: Any, known: Iterable[Any] = (), similarity: float = _SIMILAR) -> str:
    """Return the method of vllm-trie that an unknown name probably stands for.

    Args:
        name: what was asked for.
        known: what vLLM knows.
        similarity: smallest ratio of :class:`difflib.SequenceMatcher`.

    Returns:
        The method; empty for names that are known, or nearest to another or to none.
    """
    ours = available_methods()
    theirs = [one for one in known if isinstance(one, str) and one not in ours]
    if not isinstance(name, str) or name in ours or name in theirs:
        return ""
    plain = name.lower().replace("-", "_")
    nearest = difflib.get_close_matches(plain, [*ours, *theirs], n=1, cutoff=similarity)
    return nearest[0] if nearest and nearest[0] in ours else ""


def question(name: str, method: str) -> str:
    """Return the message for the user."""
    return (
        f"{name!r} is unknown; did you mean {method!r}? The methods of vllm-trie are "
        f"{', '.join(available_methods())}"
    )


def refuse(engine_args: Any) -> None:
    """Refuse engine arguments that misspell a method of vllm-trie.

    Raises:
        ValueError: naming the method that was probably meant, and all others.
    """
    speculative = engine_args.speculative_config or {}
    if not isinstance(speculative, Mapping):
        speculative = {}  # vLLM has its own message for it
    methods = list(filter(None, (engine_args.spec_method, speculative.get("method"))))
    for name in methods:
        if method := meant(name, vllm_methods()):
            raise ValueError(f"speculative method {question(name, method)}")
    if methods:
        return
    for name in filter(None, (engine_args.spec_model, speculative.get("model"))):
        method = meant(name, similarity=_SIMILAR_MODEL)
        if method and not Path(name).exists():
            raise ValueError(f"speculative model {question(name, method)}")


def vllm_methods() -> tuple[Any, ...]:
    """Return the installed vLLM's own methods; empty if it keeps them elsewhere."""
    from vllm.config import speculative

    return get_args(getattr(speculative, "SpeculativeMethod", None))
