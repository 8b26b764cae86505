"""Log lines of the plugin where a file sets up vLLM's logging."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_trie.hooks.ledger.record import Symbols


@Symbols("logger:", "vLLM keeps the loggers of plugins").wraps(
    "_configure_vllm_root_logger", "a logging configuration that names vLLM's loggers has ours, too"
)
def configure_vllm_root_logger(original: Callable[..., None], *args: object) -> None:
    """Keep the plugin's loggers: a file disables those that it does not name by default, except
    below those that it names, as vLLM's own are."""
    original(*args)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "vllm_trie" and isinstance(logger, logging.Logger):
            logger.disabled = False
