"""Entry point of the plugin: vLLM calls :func:`register` in each of its processes."""

from __future__ import annotations

import functools
import logging
from typing import Any

from vllm_trie.vllm_hooks.frontend.request_options import check_request_options
from vllm_trie.vllm_hooks.ledger import check as ledger
from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.setup import arguments
from vllm_trie.vllm_hooks.setup import engine_args as engine_setup

_installed: dict[str, str] = {}
"""What this process has hooked: feature -> "ok" or why it stepped aside."""


def status() -> dict[str, str]:
    """Feature -> "ok", or the reason why it stepped aside; empty before :func:`register`."""
    return dict(_installed)


def register() -> None:
    """Hook vLLM, once per process.

    Never raises: where vLLM is not the one that the plugin was written for, the part concerned
    steps aside with one message and plain vLLM goes on.
    """
    if _installed:
        return
    _log_as_vllm_does()
    for feature, install in (("speculation", _install_speculation), ("beam", _install_beam)):
        _installed[feature] = _try(feature, install)


class _ToVllm(logging.Handler):
    """Passes records on to vLLM's logger: its handlers, its level, whenever they are set up."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger("vllm")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)


def _log_as_vllm_does() -> None:
    """Send the package's log lines where vLLM's go: vLLM sets up loggers of its own name only."""
    ours = logging.getLogger("vllm_trie")
    if ours.handlers:  # the user has seen to it
        return
    ours.addHandler(_ToVllm())
    ours.setLevel(logging.DEBUG)
    ours.propagate = False


def _try(feature: str, install: Any) -> str:
    from vllm.logger import init_logger

    logger = init_logger("vllm_trie")
    try:
        reason = ledger.mismatch(feature)
        if not reason:
            install()
            return "ok"
    except Exception as error:
        logger.exception("vllm-trie: hooking %s failed", feature)
        reason = f"{type(error).__name__}: {error}"
    logger.error(
        "vllm-trie steps aside (%s): %s. vLLM goes on without it. Supported versions of vLLM: %s; "
        "run `vllm-trie doctor` for the whole list.",
        feature,
        reason,
        ", ".join(f"{version}.x" for version in ledger.SUPPORTED_VLLM_VERSIONS),
    )
    return reason


def _install_speculation() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_trie.vllm_hooks.frontend import stat_logger as metrics
    from vllm_trie.vllm_hooks.scheduler import cache_salt

    # Each hook stays away where a patched vLLM has an extension point for it.
    if offered("speculative_methods"):
        from vllm_trie.vllm_hooks.setup import method_registry as methods

        methods.register()
    else:
        _wrap_arguments(EngineArgs)
        _wrap_speculative_config(EngineArgs)
        _wrap_engine_config(EngineArgs)
    if offered("request_extension"):
        from vllm_trie.vllm_hooks.frontend import request_extensions as requests

        requests.register_speculation()
    else:
        _wrap_process_inputs(InputProcessor)
    if not offered("cache_salt"):
        cache_salt.install_in_scheduler()
    if not offered("proposer_stats"):
        metrics.install_in_scheduler()
    metrics.install_in_front_end()


def _install_beam() -> None:
    from vllm_trie.vllm_hooks.ledger import install_beam as beam

    beam.install()


def _wrap_arguments(engine_args: Any) -> None:
    stock = engine_args.add_cli_args

    @functools.wraps(stock)
    def add_cli_args(parser: Any) -> Any:
        parser = stock(parser)
        arguments.add_methods(parser)
        return parser

    engine_args.add_cli_args = staticmethod(add_cli_args)


def _wrap_speculative_config(engine_args: Any) -> None:
    stock = engine_args.create_speculative_config

    @functools.wraps(stock)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        engine_setup.configure(self, target_parallel_config)
        return stock(self, target_model_config, target_parallel_config)

    engine_args.create_speculative_config = create_speculative_config


def _wrap_engine_config(engine_args: Any) -> None:
    stock = engine_args.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = stock(self, *args, **kwargs)
        engine_setup.verify(vllm_config)
        return vllm_config

    engine_args.create_engine_config = create_engine_config


def _wrap_process_inputs(input_processor: Any) -> None:
    stock = input_processor.process_inputs

    @functools.wraps(stock)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check_request_options(params)
        return stock(self, request_id, prompt, params, *args, **kwargs)

    input_processor.process_inputs = process_inputs
