"""One entry of the ledger, and the symbol of vLLM that it names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Feature = Literal["speculation", "beam"]
Platform = Literal["any", "cpu", "cuda"]
Scope = Literal[
    "process", "native_search", "tree_runner", "chain_runner", "v2_runner", "v2_stage", "aside"
]
_Replacing = Literal["wrapped", "subclassed"]
_Using = Literal["overridden", "called", "made", "read", "set", "changed", "registered"]
Kind = _Replacing | _Using | Literal["relied on"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One symbol of vLLM that the plugin replaces, derives from, calls or relies on.

    Attributes:
        target: ``package.module:Class.attribute``; the attribute path may be empty for a whole
            module.
        kind: What the plugin does with it. ``wrapped`` and ``subclassed`` replace it and have a
            `wrapper`; all other kinds leave vLLM's symbol in place.
        why: The reason, one phrase.
        parameters: Parameter names that the plugin passes or expects, without ``self``; all of
            them must exist under these names and in this order. None if it is not called.
        wrapper: A function that takes what the target was and returns what replaces it; for
            ``subclassed`` the subclass.
        feature: The part that steps aside when the symbol is missing or has changed.
        scope: When the patch is in place: as long as the process runs; the same, unless the
            environment switches native beam search off; or while a worker makes its model runner,
            a scope for each kind of runner, and ``v2_stage`` for V2 in every pipeline stage; or,
            ``aside``, where the feature has stepped aside.
        platform: The only platform that the entry is for. On others its module must not even be
            imported: vLLM's CPU worker puts placeholders into ``torch.cuda`` when it is.
        upstream: Related issues or pull requests of vLLM.
        until: What would make the entry unnecessary.
    """

    target: str
    kind: Kind
    why: str
    parameters: tuple[str, ...] | None = None
    wrapper: Callable[[Any], Any] | None = None
    feature: Feature = "speculation"
    scope: Scope = "process"
    platform: Platform = "any"
    upstream: str = ""
    until: str = ""

    @property
    def reason(self) -> str:
        """Kind and reason in one phrase."""
        return f"{self.kind}: {self.why}"


def resolve(target: str) -> Any:
    """Return the object that ``package.module:attribute.path`` names.

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: An attribute on the path does not exist.
    """
    module_name, _, path = target.partition(":")
    symbol: Any = importlib.import_module(module_name)
    for name in path.split(".") if path else ():
        symbol = getattr(symbol, name)
    return symbol
