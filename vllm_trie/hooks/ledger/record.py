"""Entries next to the code that they are about: decorators that record them on import.

An override or a replacement takes its target's name and parameters from its own definition, so that
its entry cannot outlive it. What is only called, read or relied on is in modules called ``uses``.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, cast

from vllm_trie.hooks.ledger.entry import Entry, Kind, Scope

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
Result = TypeVar("Result")
"""What a wrapped function returns, and its wrapper too."""

PLUGGABLE = "speculative methods can be registered by plugins"
TREE_DRAFTS = "vLLM verifies trees of drafts itself"
TREE_MASKS = "attention metadata carries tree masks"
TOKEN_LISTS = "the sampler returns the best of a list of tokens for each request"
PREFIX = "vLLM's CPU attention reads a shared prefix once"
STATS = "proposers can report statistics"
TESTED = "tree attention has been run on enough devices"
SEARCH = "vLLM serves beam search inside its scheduler"
UPSTREAM = "vllm-project/vllm issues 14426, 20316, 49197"
"""What would make most entries unnecessary, and issues that ask for beam search."""

ENTRIES: list[Entry] = []
"""The entries of all modules that were imported."""
_AROUND: defaultdict[str, list[Callable[[Any], Any]]] = defaultdict(list)
"""What :meth:`Symbols.wraps` has wrapped around a target, the innermost first."""


def around(function: Callable[..., Any]) -> Callable[[_Decorated], _Decorated]:
    """Return a decorator that has a function called in place of another, its first argument."""

    def decorate(original: _Decorated) -> _Decorated:
        @functools.wraps(original)
        def replacement(*args: object, **kwargs: object) -> Any:
            return function(original, *args, **kwargs)

        return cast(_Decorated, replacement)

    return decorate


class Symbols:
    """Symbols of vLLM whose names begin alike, and the fields that their entries share.

    Args:
        prefix: The beginning of the targets, behind ``vllm.``.
        until: What would make the entries unnecessary.
        fields: Further fields of :class:`Entry`.
    """

    def __init__(self, prefix: str = "", until: str = "", **fields: object) -> None:
        self._prefix = f"vllm.{prefix}"
        self._fields = {"until": until, **fields}

    def overrides(self, why: str, **fields: object) -> Callable[[_Decorated], _Decorated]:
        """Record a method of a subclass under the name of vLLM's, with the parameters it names."""

        def record(method: _Decorated) -> _Decorated:
            self._add(method.__name__, "overridden", why, _parameters(method), fields)
            return method

        return record

    def within_wrappers(self, method: _Decorated) -> _Decorated:
        """Have what wraps vLLM's method wrap one that overrides it and does not call it, too."""
        target = self._prefix + method.__name__

        @functools.wraps(method)
        def override(*args: object, **kwargs: object) -> Any:
            whole = functools.reduce(lambda inner, wrap: wrap(inner), _AROUND[target], method)
            return whole(*args, **kwargs)

        return cast(_Decorated, override)

    def wraps(self, name: str, why: str, **fields: object) -> Callable[[_Decorated], _Decorated]:
        """Have a function take the place of vLLM's, which it gets as its first argument."""

        def record(function: _Decorated) -> _Decorated:
            wrap = around(function)
            replacing = {"wrapper": wrap, **fields}
            _AROUND[self._prefix + name].append(wrap)
            self._add(name, "wrapped", why, _parameters(function)[1:], replacing)
            return function

        return record

    def replaces(self, name: str, why: str, **fields: object) -> Callable[[_Decorated], _Decorated]:
        """Have what a function returns take the place of vLLM's value, its only argument."""

        def record(function: _Decorated) -> _Decorated:
            self._add(name, "wrapped", why, None, {"wrapper": function, **fields})
            return function

        return record

    def subclasses(
        self, name: str, why: str, parameters: str, **fields: object
    ) -> Callable[..., Any]:
        """Have a subclass take the place of vLLM's class in the module that uses it."""

        def record(subclass: type) -> type:
            names = tuple(parameters.split())
            self._add(name, "subclassed", why, names, {"wrapper": subclass, **fields})
            return subclass

        return record

    def __call__(
        self, name: str, kind: Kind, why: str, parameters: str | None = None, **fields: object
    ) -> None:
        """Record a use without code of its own; parameters are separated by spaces."""
        names = None if parameters is None else tuple(parameters.split())
        self._add(name, kind, why, names, fields)

    def _add(
        self,
        name: str,
        kind: Kind,
        why: str,
        parameters: tuple[str, ...] | None,
        fields: dict[str, Any],
    ) -> None:
        shared = {**self._fields, **fields}
        ENTRIES.append(Entry(self._prefix + name, kind, why, parameters, **shared))


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of parameters, without the instance and those that take the rest."""
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind not in rest and p.name not in ("self", "cls"))


def of_beams(
    prefix: str = "", until: str = SEARCH, scope: Scope = "native_search", **fields: object
) -> Symbols:
    """Return symbols that beam search needs."""
    return Symbols(prefix, until, feature="beam", upstream=UPSTREAM, scope=scope, **fields)
