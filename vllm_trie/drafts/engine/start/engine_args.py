"""Engines as vLLM configures them: arguments, worker class, scheduler class, limits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext

from vllm_trie.drafts import get_drafter_class
from vllm_trie.drafts.engine import config
from vllm_trie.drafts.engine.start.draft_support import choose_verification
from vllm_trie.drafts.engine.start.translate import (
    draft_for_one_length,
    requested_method,
    translate,
)
from vllm_trie.extras import loaded
from vllm_trie.hooks.ledger.record import PLUGGABLE, Symbols
from vllm_trie.hooks.start import runner_choice
from vllm_trie.hooks.start.refusal import refusing_start
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(f"vllm.{__name__}")

_ANSWERED = {
    "vllm.config.speculative": "Using a custom class-based proposer backend",
    "vllm.config.vllm": "max_num_scheduled_tokens is set to",
}
"""By logger, the beginning of warnings that do not apply to the plugin's methods."""


@refusing_start()
def configure(engine_args: EngineArgs) -> None:
    """Rewrite the engine arguments, in place, if they ask for a method of vllm-trie.

    Raises:
        RefusedError: An option or a combination is not allowed, or options are set without a
            method.
    """
    method = requested_method(engine_args)
    translate(engine_args)
    if method is not None:
        _answer_for_custom_class(engine_args)
        _choose_worker(engine_args, method)


def _answer_for_custom_class(engine_args: EngineArgs) -> None:
    """Keep vLLM from warning of what the plugin has chosen.

    Trees need no slots of their own, so ``max_num_scheduled_tokens`` is not reduced for them. The
    class ``custom_class`` is experimental for others than this plugin, whose ledger holds it to the
    installed vLLM. Asynchronous scheduling, which vLLM switches off for it with a warning, is set
    off where the user left it open.
    """
    for name in _ANSWERED:
        logging.getLogger(name).addFilter(_is_about_others)
    speculative: Any = engine_args.speculative_config
    is_on_v1 = speculative["method"] == runner_choice.V1_METHOD
    if is_on_v1 and engine_args.async_scheduling is None:
        engine_args.async_scheduling = False


def _is_about_others(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_ANSWERED[record.name])


def _choose_worker(engine_args: EngineArgs, method: str) -> None:
    """Set the worker class if the user left it to vLLM; refuse another one."""
    from vllm.platforms import current_platform

    worker_class = config.CPU_WORKER_CLASS if current_platform.is_cpu() else config.GPU_WORKER_CLASS
    if engine_args.worker_cls not in ("auto", worker_class):
        raise RefusedError(
            f"speculative method {method!r} of vllm-trie brings its own worker class, but "
            f"worker_cls={engine_args.worker_cls!r} was set; leave worker_cls at 'auto'"
        )
    engine_args.worker_cls = worker_class


@refusing_start()
def check(vllm_config: VllmConfig) -> None:
    """Refuse a complete configuration that its method cannot run with; finish one that it can.

    Refuses files that options name and that cannot be used, by their headers.

    Raises:
        RefusedError: Every reason at once.
    """
    tree_config = config.read(vllm_config)
    if tree_config is not None:
        speculative: Any = vllm_config.speculative_config
        if tree_config.speculator is None and speculative.method not in runner_choice.METHODS:
            raise RefusedError(
                f"speculative method {tree_config.method!r} was asked for, but the checkpoint "
                f"brings {speculative.method!r}; serve the model that it names as its verifier"
            )
        options = tree_config.engine_options
        if tree_config.speculator is not None:
            tree_config.speculator.check(vllm_config, options)
        chosen = choose_verification(vllm_config, tree_config.method, options.verification)
        config.set_verification(vllm_config, chosen)
        draft_for_one_length(vllm_config)
        _leave_requests_unpadded(vllm_config)
        # A worker would find them too, a minute later and inside its traceback.
        get_drafter_class(tree_config.method).check_files(
            tree_config.drafter_options,
            vllm_config.model_config.get_vocab_size(),
            tree_config.draft_model,
        )
    for start_check in loaded("start_check"):
        start_check(vllm_config)


def _leave_requests_unpadded(vllm_config: VllmConfig) -> None:
    """Keep vLLM from padding a request with one token left to compute to the size of a full draft.

    The padding keeps CUDA graphs whole that take one length only. It costs rows. Worse, a padded
    request that does not fit a step's tokens waits for ever, and one that is longer than
    ``long_prefill_token_threshold`` ends the engine with an assertion. vLLM does not pad where the
    length of drafts depends on the batch size; here it is the same for every size.
    """
    speculative = vllm_config.speculative_config
    assert speculative is not None
    if speculative.num_speculative_tokens_per_batch_size is None:
        largest = vllm_config.scheduler_config.max_num_seqs
        speculative.num_speculative_tokens_per_batch_size = [
            (1, largest, speculative.num_speculative_tokens)
        ]


# -- patches ---------------------------------------------------------------------------------------


@Symbols("engine.arg_utils:EngineArgs.", PLUGGABLE).wraps(
    "create_engine_config",
    "rewrites a method of vllm-trie to one of vLLM's, and refuses unsupported configurations",
)
def create_engine_config(
    original: Callable[..., VllmConfig], self: EngineArgs, *args: object, **kwargs: object
) -> VllmConfig:
    """Check each configuration that vLLM has completed."""
    configure(self)
    vllm_config = original(self, *args, **kwargs)
    check(vllm_config)
    if UsageContext.LLM_CLASS in (*args, *kwargs.values()):
        _count_drafts(vllm_config)
    return vllm_config


def _count_drafts(vllm_config: VllmConfig) -> None:
    """Have the outputs of ``LLM`` say how many of their drafts were accepted."""
    observability = vllm_config.observability_config
    is_off = observability.per_request_spec_decode_metrics == "none"
    if is_off and config.read(vllm_config) is not None:
        observability.per_request_spec_decode_metrics = "summary"
