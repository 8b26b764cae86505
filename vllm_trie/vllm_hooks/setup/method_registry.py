"""The plugin's methods in the registry of a patched vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.spec_decode.method_registry import (  # type: ignore[import-not-found]
    SpeculativeMethods,
    register_speculative_methods,
)

from vllm_trie.drafters import available_methods
from vllm_trie.vllm_hooks.setup import engine_args as engine_setup


class TreeMethods(SpeculativeMethods):
    """All methods that drafters are registered for."""

    def names(self) -> Sequence[str]:
        return available_methods()

    def configure(self, engine_args: Any, parallel_config: Any) -> None:
        engine_setup.configure(engine_args, parallel_config)

    def verify(self, vllm_config: Any) -> None:
        engine_setup.verify(vllm_config)


def register() -> None:
    """Add the methods."""
    register_speculative_methods(TreeMethods())
