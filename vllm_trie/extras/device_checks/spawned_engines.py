"""Engines whose process is spawned: plugins are there before the engine is.

vLLM loads them inside of ``EngineCore.__init__``, which is then too late to wrap. The configuration
therefore loads them where it is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.plugins import load_general_plugins

from vllm_trie.hooks.ledger.record import TESTED, Symbols, of_beams

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_ATTRIBUTE = "_vllm_trie_plugins"


class _Plugins:
    """Stands for vLLM's plugins in a configuration."""

    def __reduce__(self) -> tuple[Callable[[], _Plugins], tuple[()]]:
        return _loaded_plugins, ()


def _loaded_plugins() -> _Plugins:
    load_general_plugins()
    return _Plugins()


def create_engine_config(
    original: Callable[..., VllmConfig], self: EngineArgs, *args: object, **kwargs: object
) -> VllmConfig:
    """Have a process load the plugins when it gets the configuration."""
    vllm_config = original(self, *args, **kwargs)
    # vLLM makes copies of the configuration itself, for which it must have no fields but its own.
    setattr(vllm_config.observability_config, _ATTRIBUTE, _Plugins())
    return vllm_config


def _record(symbols: Symbols) -> None:
    why = "has the configuration load plugins where a spawned engine unpickles it"
    symbols.wraps("engine.arg_utils:EngineArgs.create_engine_config", why)(create_engine_config)
    symbols("plugins:load_general_plugins", "called", "by a spawned engine, to wrap its start", "")
    symbols(
        "v1.engine.core:EngineCoreProc.run_engine_core",
        "relied on",
        "runs in a spawned process, which has unpickled the engine's configuration",
    )


_record(Symbols("", TESTED))
_record(of_beams())
