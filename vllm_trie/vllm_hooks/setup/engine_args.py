"""Engines as vLLM configures them: arguments, worker class, scheduler class, limits."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_trie.vllm_hooks.ledger import offered
from vllm_trie.vllm_hooks.setup import config, items, runner_choice, support

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = init_logger(__name__)


def configure(engine_args: EngineArgs, parallel_config: ParallelConfig) -> None:
    """Rewrite the engine arguments, in place, if they ask for a method of vllm-trie.

    Raises:
        ValueError: an option or a combination is not allowed, or options are set without a method.
    """
    method = config.requested_method(engine_args)
    config.translate(engine_args)
    if method is not None and not offered("draft_verifier"):
        _choose_worker(parallel_config, method)


def _choose_worker(parallel_config: ParallelConfig, method: str) -> None:
    """Set the worker class if the user left it to vLLM; refuse another one."""
    from vllm.platforms import current_platform

    ours = config.CPU_WORKER_CLASS if current_platform.is_cpu() else config.GPU_WORKER_CLASS
    if parallel_config.worker_cls not in ("auto", ours):
        raise ValueError(
            f"speculative method {method!r} of vllm-trie brings its own worker class, but "
            f"worker_cls={parallel_config.worker_cls!r} was set; leave worker_cls at 'auto'"
        )
    parallel_config.worker_cls = ours


def verify(vllm_config: VllmConfig) -> None:
    """Refuse a complete configuration that its method cannot run with; finish one that it can.

    Refuses catalogues that cannot serve, too.

    Raises:
        ValueError: every reason at once.
    """
    tree_config = config.read(vllm_config)
    if tree_config is not None:
        asked = tree_config.engine_options.verification
        _check_trace_path(tree_config.engine_options.trace_path)
        chosen = support.choose_verification(vllm_config, tree_config.method, asked)
        config.set_verification(vllm_config, chosen)
        _leave_requests_unpadded(vllm_config)
    items.check_catalogues(vllm_config)


def _check_trace_path(trace_path: str | None) -> None:
    if trace_path is None:
        return
    if not os.path.isdir(trace_path) or not os.access(trace_path, os.W_OK | os.X_OK):
        raise ValueError(
            f"trace_path={trace_path!r} must be a folder that exists and that the engine may write "
            "to; create it, or leave trace_path out"
        )


def _leave_requests_unpadded(vllm_config: VllmConfig) -> None:
    """Keep vLLM from padding a request with one token left to compute to the size of a full draft.

    The padding keeps CUDA graphs whole. Trees have none to keep, and pay for the rows. Worse, a
    padded request that does not fit a step's tokens waits for ever, and one that is longer than
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


def _belongs_on_v2(vllm_config: VllmConfig) -> bool:
    if config.read(vllm_config) is None or config.verification(vllm_config) != "chain":
        return False
    return runner_choice.belongs_on_v2(vllm_config)


# -- patches ---------------------------------------------------------------------------------------


def wrap_create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rewrite the engine arguments before vLLM reads its speculative configuration from them."""

    @functools.wraps(original)
    def create_speculative_config(
        self: EngineArgs, target_model_config: Any, target_parallel_config: ParallelConfig
    ) -> Any:
        configure(self, target_parallel_config)
        return original(self, target_model_config, target_parallel_config)

    return create_speculative_config


def wrap_create_engine_config(original: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
    """Verify each configuration that vLLM has completed."""

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        given = copy.copy(vars(self))
        vllm_config = original(self, *args, **kwargs)
        verify(vllm_config)
        if _belongs_on_v2(vllm_config):
            vars(self).update(given)
            with runner_choice.on_v2():
                vllm_config = original(self, *args, **kwargs)
            verify(vllm_config)
        return vllm_config

    return create_engine_config


def wrap_get_scheduler_cls(original: Callable[..., Any]) -> Callable[..., Any]:
    """Choose a scheduler with beam search where the user left ``scheduler_cls`` out."""

    @functools.wraps(original)
    def get_scheduler_cls(self: SchedulerConfig) -> Any:
        if self.scheduler_cls is not None:
            logger.info_once(
                "Native beam search is off: scheduler_cls=%s was given; leave it out to have it. "
                "vLLM's own beam search is used.",
                str(self.scheduler_cls),
            )
            return original(self)
        # Not before an engine asks: front ends need no scheduler.
        from vllm_trie.vllm_hooks.scheduler.beam_scheduler import scheduler_class

        return scheduler_class(self)

    return get_scheduler_cls
