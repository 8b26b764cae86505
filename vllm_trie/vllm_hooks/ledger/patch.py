"""One line of the ledger, and the symbol of vLLM that it names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

Platform = Literal["any", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Hook:
    """One line of the ledger.

    Attributes:
        target: ``package.module:Class.attribute``; the attribute path may be empty for a whole
            module.
        reason: Why the plugin touches it, one sentence.
        parameters: Parameter names that the plugin passes or expects, without ``self``; all of them
            must exist under these names and in this order. ``None`` if the symbol is not called.
        upstream: Related issue or pull request of vLLM, empty if there is none.
        retire_when: What would make this line unnecessary.
        feature: ``"speculation"`` or ``"beam"``: the part that steps aside when the symbol is gone.
        platform: The only platform that the line is for. On others its module must not even be
            imported: vLLM's CPU worker puts placeholders into ``torch.cuda`` when it is.
        extension_point: The point of :mod:`~vllm_trie.vllm_hooks.ledger.extension_points` that
            replaces the line in a patched vLLM; empty where nothing is patched because the plugin
            calls vLLM, derives from its classes or relies on what it does.
    """

    target: str
    reason: str
    parameters: tuple[str, ...] | None = None
    upstream: str = ""
    retire_when: str = ""
    feature: Literal["speculation", "beam"] = "speculation"
    platform: Platform = "any"
    extension_point: str = ""


def resolve(target: str) -> Any:
    """Return the object that ``package.module:attribute.path`` names.

    Raises:
        ImportError: The module cannot be imported.
        AttributeError: An attribute on the path does not exist.
    """
    module_name, _, path = target.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found
