"""Engines that are asked for one of our methods: their arguments, worker class and limits."""

from __future__ import annotations

from typing import Any

from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.setup import config, support


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


def verify(vllm_config: Any) -> None:
    """Refuse a complete configuration that the tree method it asks for cannot run with.

    One that it can run with gets the last setting that the method needs, see
    :func:`_leave_requests_unpadded`.

    Raises:
        ValueError: every reason at once.
    """
    tree_config = config.read(vllm_config)
    if tree_config is not None:
        support.check_supported(
            vllm_config, tree_config.method, tree_config.engine_options.allow_untested_gpu
        )
        _leave_requests_unpadded(vllm_config)


def _leave_requests_unpadded(vllm_config: Any) -> None:
    """Keep vLLM from padding a request with one token left to compute to the size of a full draft.

    The padding keeps CUDA graphs whole. Trees have none to keep, and pay for the rows. Worse, where
    the padded request does not fit a step's tokens it waits for ever, and where it is longer than
    ``long_prefill_token_threshold`` an assertion ends the engine. vLLM does not pad where the
    length of drafts depends on the batch size; here it is the same for every size.
    """
    speculative = vllm_config.speculative_config
    if speculative.num_speculative_tokens_per_batch_size is None:
        largest = vllm_config.scheduler_config.max_num_seqs
        speculative.num_speculative_tokens_per_batch_size = [
            (1, largest, speculative.num_speculative_tokens)
        ]
