"""Methods of vllm-trie that are asked for where the plugin has stepped aside."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_trie.drafts.engine.start.translate import requested_method
from vllm_trie.hooks import plugin
from vllm_trie.hooks.ledger.record import PLUGGABLE, Symbols
from vllm_trie.hooks.start.refusal import refusing_start
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


@Symbols("engine.arg_utils:EngineArgs.", PLUGGABLE, scope="aside").wraps(
    "create_engine_config", "says why a method is not there, where vLLM would call it unknown"
)
def create_engine_config(
    original: Callable[..., Any], self: EngineArgs, *args: object, **kwargs: object
) -> Any:
    """Refuse a method of vllm-trie.

    Raises:
        RefusedError: Naming what the plugin has stepped aside for.
    """
    with refusing_start():
        if method := requested_method(self):
            raise RefusedError(
                f"speculative method {method!r} cannot run, as vllm-trie has stepped aside: "
                f"{plugin.status()['speculation']}. Install a release of vLLM that it supports "
                f"({plugin.supported()}) or a newer vllm-trie, or leave the method out"
            )
    return original(self, *args, **kwargs)
