"""Entry point of the plugin: vLLM calls :func:`register` in each of its processes."""

from __future__ import annotations

import functools
import logging
from typing import Any

from vllm_trie.vllm_hooks import arguments, config, ledger, support
from vllm_trie.vllm_hooks.eligibility import check_request_options
from vllm_trie.vllm_hooks.extension_points import offered

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

    from vllm_trie.vllm_hooks import cache_salt, metrics

    # Each hook stays away where a patched vLLM has an extension point for it.
    if offered("speculative_methods"):
        from vllm_trie.vllm_hooks.extensions import methods

        methods.register()
    else:
        _wrap_arguments(EngineArgs)
        _wrap_speculative_config(EngineArgs)
        _wrap_engine_config(EngineArgs)
    if offered("request_extension"):
        from vllm_trie.vllm_hooks.extensions import requests

        requests.register_speculation()
    else:
        _wrap_process_inputs(InputProcessor)
    if not offered("cache_salt"):
        cache_salt.install_in_scheduler()
    if not offered("proposer_stats"):
        metrics.install_in_scheduler()
    metrics.install_in_front_end()


def _install_beam() -> None:
    from vllm_trie.vllm_hooks import beam

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
        configure(self, target_parallel_config)
        return stock(self, target_model_config, target_parallel_config)

    engine_args.create_speculative_config = create_speculative_config


def configure(engine_args: Any, parallel_config: Any) -> None:
    """Rewrite the engine arguments, in place, if they ask for one of our methods.

    Raises:
        ValueError: an option or a combination is not allowed, or options stand there without a
            method.
    """
    method = config.requested_method(engine_args)
    config.translate(engine_args)
    if method is not None:
        _choose_worker(engine_args, parallel_config, method)


def _choose_worker(engine_args: Any, parallel_config: Any, method: str) -> None:
    """Set the worker class if the user left it to vLLM; refuse to fight over it otherwise."""
    if engine_args.scheduler_cls is not None:
        raise ValueError(
            f"speculative method {method!r} of vllm-trie and scheduler_cls="
            f"{engine_args.scheduler_cls!r} cannot be used together; leave scheduler_cls out"
        )
    if offered("draft_verifier"):  # any worker's runner calls us
        return
    from vllm.platforms import current_platform

    ours = config.CPU_WORKER_CLASS if current_platform.is_cpu() else config.GPU_WORKER_CLASS
    if parallel_config.worker_cls not in ("auto", ours):
        raise ValueError(
            f"speculative method {method!r} of vllm-trie brings its own worker class, but "
            f"worker_cls={parallel_config.worker_cls!r} was set; leave worker_cls at 'auto'"
        )
    parallel_config.worker_cls = ours


def _wrap_engine_config(engine_args: Any) -> None:
    stock = engine_args.create_engine_config

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = stock(self, *args, **kwargs)
        verify(vllm_config)
        return vllm_config

    engine_args.create_engine_config = create_engine_config


def verify(vllm_config: Any) -> None:
    """Refuse a complete configuration that the tree method it asks for cannot run with.

    Raises:
        ValueError: every reason at once.
    """
    tree_config = config.read(vllm_config)
    if tree_config is not None:
        support.check_supported(
            vllm_config, tree_config.method, tree_config.engine_options.allow_untested_gpu
        )


def _wrap_process_inputs(input_processor: Any) -> None:
    stock = input_processor.process_inputs

    @functools.wraps(stock)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        check_request_options(params)
        return stock(self, request_id, prompt, params, *args, **kwargs)

    input_processor.process_inputs = process_inputs
