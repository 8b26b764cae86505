"""Drafting methods by name: built-in ones, and those that programs and other packages add."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_trie.drafts.drafter import Drafter
from vllm_trie.extras import brought
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

ENTRY_POINT_GROUP = "vllm_trie.drafters"
"""Entry points in this group, `name = "module:DrafterClass"`, become methods."""

# Entry points too: a method's module is imported on first use, and some import torch.
_BUILT_IN = {
    name: EntryPoint(name, f"{package}.{value}", ENTRY_POINT_GROUP)
    for package, methods in (
        ("vllm_trie.drafts", {"ngram_trie": "ngram_trie:NgramTrieDrafter"}),
        *brought("methods"),
    )
    for name, value in methods.items()
}
_registered: dict[str, type[Drafter]] = {}
_REMOVED = {
    "adaptive": "all parts of a union draft in every step",
    "num_alternatives": "a trained drafter drafts a chain",
    "store_reload_minutes": "an engine reads its store at the start alone",
}
"""Options of earlier releases, and what goes without them."""

OptionsT = TypeVar("OptionsT", bound=BaseModel)


def register(drafter_class: type[Drafter]) -> None:
    """Make a drafter class a method of this process, under its `name`.

    Raises:
        ValueError: `drafter_class` is not a `Drafter` with a name, or another class has its name.
    """
    name = getattr(drafter_class, "name", None)
    if not (_is_drafter(drafter_class) and isinstance(name, str)):
        raise ValueError(
            f"register() got {drafter_class!r}; it takes a subclass of vllm_trie.drafters.Drafter "
            "that has a `name`"
        )
    if name in available_methods() and (owner := get_drafter_class(name)) is not drafter_class:
        raise ValueError(
            f"{drafter_class.__qualname__} has the name {name!r}, which belongs to "
            f"{owner.__qualname__}; choose another `name`"
        )
    _registered[name] = drafter_class


def unregister(drafter_class: type[Drafter]) -> None:
    """Undo `register`; a class that is not registered is ignored."""
    if _registered.get(drafter_class.name) is drafter_class:
        del _registered[drafter_class.name]


def available_methods() -> tuple[str, ...]:
    """Return the names of all methods, sorted; nothing is imported."""
    return tuple(sorted({*_BUILT_IN, *_registered, *_entry_points()}))


def get_drafter_class(method: str) -> type[Drafter]:
    """Return the drafter class of a method; built-in names cannot be overridden.

    Raises:
        RefusedError: The method is unknown, or its entry point is not a `Drafter`.
    """
    if method in _registered:
        return _registered[method]
    point = _BUILT_IN.get(method) or _entry_points().get(method)
    if point is None:
        allowed = ", ".join(available_methods())
        raise RefusedError(f"method {method!r} is not a drafting method; allowed: {allowed}")
    loaded = point.load()
    if not _is_drafter(loaded):
        raise RefusedError(
            f"method {method!r}: the entry point {point.value!r} is not a subclass of "
            "vllm_trie.drafters.Drafter; correct it in the package that registers it"
        )
    return loaded


def parse_options(method: str, mapping: Mapping[str, object]) -> BaseModel:
    """Check a method's options and fill in defaults.

    Raises:
        RefusedError: Naming each wrong option, the value received and what is allowed.
    """
    return validated(get_drafter_class(method).Options, mapping, method)


def validated(options: type[OptionsT], mapping: Mapping[str, object], method: str) -> OptionsT:
    """Return some of a method's options, checked.

    Raises:
        RefusedError: As :func:`parse_options`.
    """
    try:
        return options.model_validate(dict(mapping))
    except ValidationError as error:
        every = error.errors()
        # An entry that may be of several types has a problem with each, and is named once.
        removed = {problem["loc"][0] for problem in every if _removed(problem)}
        problems = [
            _describe_problem(options, problem)
            for problem in every
            if _removed(problem) or not {*problem["loc"][:1]} & removed
        ]
        raise RefusedError(f"options of method {method!r}: {'; '.join(problems)}") from None


def _removed(problem: ErrorDetails) -> str | None:
    is_unknown = problem["type"] == "extra_forbidden"
    return _REMOVED.get(str(problem["loc"][-1])) if is_unknown else None


def _describe_problem(options: type[BaseModel], problem: ErrorDetails) -> str:
    if why := _removed(problem):
        given = f"{problem['loc'][-1]}={problem['input']!r}"
        return f"{given} has no effect since 0.5: {why}; leave it out"
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        allowed = ", ".join(options.model_fields) or "none"
        return f"{name} is not an option; allowed: {allowed}"
    if not name:
        return str(problem["msg"])
    return f"{name}={problem['input']!r}: {problem['msg']}"


def _is_drafter(candidate: object) -> TypeGuard[type[Drafter]]:
    return isinstance(candidate, type) and issubclass(candidate, Drafter)


@functools.cache  # reads the metadata of all installed packages, which takes 30 ms
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
