"""Whether native beam search serves an engine, and if not, why."""

from __future__ import annotations

import os
from typing import Any

from vllm.logger import init_logger

from vllm_trie.vllm_hooks.setup.config_keys import (
    ALLOW_GPU,
    BEAM_SEARCH,
    CONFIG_KEY,
    spelled,
    switch,
)

logger = init_logger(__name__)

ENV_SWITCH = "VLLM_TRIE_BEAM"


def switched_off() -> str | None:
    """Why the environment turns native beam search off, None if it does not."""
    value = os.environ.get(ENV_SWITCH, "1").strip().lower()
    if value in ("0", "false", "off", "no"):
        return f"the environment variable {ENV_SWITCH}={value} turns it off"
    return None


def reason_off(vllm_config: Any) -> str | None:
    """Why native beam search does not serve this engine, None if it does.

    A pure function of the configuration: the front end and the engine's process come to the same
    answer.
    """
    if reason := switched_off():
        return reason
    if switch(vllm_config, BEAM_SEARCH) is False:
        return f"{spelled(BEAM_SEARCH)}=False turns it off"
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    if scheduler_cls is not None and not _is_ours(scheduler_cls):
        return f"scheduler_cls={scheduler_cls!r} is not one of ours; leave scheduler_cls out"
    return (
        _platform_reason(vllm_config)
        or _model_reason(vllm_config.model_config)
        or _engine_reason(vllm_config)
    )


def say_where_untested(vllm_config: Any) -> None:
    """One log line at start-up where the platform is none that beam search was tested on."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    reason = reason_off(vllm_config)
    if reason is None:
        logger.warning(
            "Native beam search is on by %s=True. It has never run on a GPU: before you rely on "
            "it, run `vllm-trie beam check MODEL --%s`.",
            ALLOW_GPU,
            ALLOW_GPU.replace("_", "-"),
        )
    elif reason == _platform_reason(vllm_config):
        logger.info("Native beam search is off, vLLM's own serves: %s", reason)


def cache_reason(kv_cache_config: Any) -> str | None:
    """Why KV blocks of this cache cannot be shared and copied by rows, None if they can.

    What a model's configuration does not say, its cache does: only groups that keep every token of
    a request, one state each, can be forked block by block.
    """
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        several = isinstance(spec, UniformTypeKVCacheSpecs)
        for each in spec.kv_cache_specs.values() if several else (spec,):
            if type(each) not in (FullAttentionSpec, MLAAttentionSpec):
                return f"KV cache of kind {type(each).__name__} is not supported"
            if getattr(each, "tokens_per_state", 1) != 1:
                return "compressed KV cache (several tokens in one state) is not supported"
    return None


def reason_for_stock_search(vllm_config: Any, params: Any) -> str | None:
    """Why only vLLM's own search can serve a ``BeamSearchParams``, None if the native one can."""
    if reason := reason_off(vllm_config):
        return reason
    if params.structured_outputs is not None:
        return "structured_outputs need vLLM's own search"
    if getattr(params, "allowed_token_ids", None) is not None:  # since vLLM 0.33
        return "allowed_token_ids need vLLM's own search"
    return None


def _platform_reason(vllm_config: Any) -> str | None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return f"platform {current_platform.device_type!r} is neither a CPU nor an NVIDIA GPU"
    if not switch(vllm_config, ALLOW_GPU):
        return (
            "it has never run on a GPU; to try it, set "
            f'additional_config={{"{CONFIG_KEY}": {{"{ALLOW_GPU}": True}}}}'
        )
    return None


def _is_ours(scheduler_cls: Any) -> bool:
    name = scheduler_cls if isinstance(scheduler_cls, str) else scheduler_cls.__module__
    return name.startswith("vllm_trie.vllm_hooks.scheduler")


def _model_reason(model: Any) -> str | None:
    if model is None or model.runner_type != "generate":
        return "the model does not generate text"
    if model.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    if getattr(model, "is_diffusion", False):
        return "diffusion models are not supported"
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        return "models with state-space or recurrent layers are not supported"
    if model.get_sliding_window() is not None:
        return "sliding-window attention is not supported"
    if getattr(model, "attention_chunk_size", None):
        return "attention in chunks (attention_chunk_size) is not supported"
    if model.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        return (
            f"logprobs_mode={model.logprobs_mode!r} yields no log-probabilities; use 'raw_logprobs'"
        )
    return None


def _engine_reason(vllm_config: Any) -> str | None:
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism is not supported"
    if vllm_config.kv_transfer_config is not None:
        return "KV connectors (kv_transfer_config) are not supported"
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        return "encoder-cache connectors (ec_transfer_config) are not supported"
    return None
