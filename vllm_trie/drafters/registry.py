"""Drafting methods by name: the built-in ones and those that other packages register."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm_trie.drafters.base import Drafter

ENTRY_POINT_GROUP = "vllm_trie.drafters"
"""Entry points in this group, `name = "module:DrafterClass"`, become methods."""

_BUILT_IN = {
    "lookahead_trie": "vllm_trie.drafters.lookahead:LookaheadDrafter",
    "medusa_dynamic": "vllm_trie.drafters.medusa:MedusaDrafter",
    "ngram_trie": "vllm_trie.drafters.ngram_trie:NgramTrieDrafter",
    "trie_union": "vllm_trie.drafters.union:TrieUnionDrafter",
}


def available_methods() -> tuple[str, ...]:
    """Names of all methods, sorted; nothing is imported."""
    return tuple(sorted({*_BUILT_IN, *_registered()}))


def get_drafter_class(method: str) -> type[Drafter]:
    """The drafter class of a method; built-in names cannot be overridden.

    Raises:
        ValueError: the method is unknown, or its entry point is not a `Drafter`.
    """
    if method in _BUILT_IN:
        module, _, attribute = _BUILT_IN[method].partition(":")
        drafter: type[Drafter] = getattr(import_module(module), attribute)
        return drafter
    registered = _registered()
    if method not in registered:
        allowed = ", ".join(available_methods())
        raise ValueError(f"method {method!r} is not a drafting method; allowed: {allowed}")
    loaded = registered[method].load()
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)):
        raise ValueError(
            f"method {method!r}: the entry point {registered[method].value!r} is not a subclass of "
            "vllm_trie.drafters.Drafter; correct it in the package that registers it"
        )
    return loaded


def parse_options(method: str, mapping: Mapping[str, Any]) -> BaseModel:
    """Check a method's options and fill in defaults.

    Raises:
        ValueError: naming each wrong option, the value received and what is allowed.
    """
    options = get_drafter_class(method).Options
    try:
        return options.model_validate(dict(mapping))
    except ValidationError as error:
        problems = [
            _describe_problem(options, ".".join(map(str, found["loc"])), found)
            for found in error.errors()
        ]
        raise ValueError(f"options of method {method!r}: {'; '.join(problems)}") from None


def _describe_problem(options: type[BaseModel], name: str, found: Any) -> str:
    if found["type"] == "extra_forbidden":
        allowed = ", ".join(options.model_fields) or "none"
        return f"{name} is not an option; allowed: {allowed}"
    if not name:
        return str(found["msg"])
    return f"{name}={found['input']!r}: {found['msg']}"


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
