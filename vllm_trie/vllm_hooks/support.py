"""What tree speculation does not support, refused at start-up with the setting's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_trie.attention.cpu_cache import SUPPORTED_ISAS


def check_supported(vllm_config: Any, method: str) -> None:
    """Refuse a configuration that tree verification cannot serve.

    Raises:
        ValueError: every reason at once, each with what to do.
    """
    problems = list(_problems(vllm_config))
    if problems:
        raise ValueError(
            f"speculative method {method!r} of vllm-trie cannot run with this configuration:\n- "
            + "\n- ".join(problems)
        )


def _problems(config: Any) -> Iterator[str]:
    yield from _platform_problems(config)
    yield from _model_problems(config.model_config)
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported; set it "
            "to 1 (tensor parallelism works)"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism is not supported; leave its sizes at 1"
    if parallel.use_ubatching:
        yield "dual batch overlap is not supported; switch it off"
    if config.kv_transfer_config is not None:
        yield (
            "KV connectors (kv_transfer_config) are not supported: they could send KV of rejected "
            "nodes; leave the setting out"
        )
    if config.cache_config.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill is not supported; switch it off"
    if config.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        yield (f"kv_cache_dtype={config.cache_config.cache_dtype!r} is not supported; use 'auto'")
    if config.use_v2_model_runner:
        yield (
            "Model Runner V2 is not supported; unset VLLM_USE_V2_MODEL_RUNNER (vLLM then chooses "
            "V1 by itself)"
        )


def _platform_problems(config: Any) -> Iterator[str]:
    import torch
    from vllm.platforms import CpuArchEnum, current_platform

    if not current_platform.is_cpu():
        yield (
            f"platform {current_platform.device_name!r} has no tree attention kernel yet; tree "
            "speculation runs on x86 CPUs"
        )
        return
    if current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        yield (
            f"CPU architecture {current_platform.get_cpu_architecture().name} is not supported: "
            f"tree attention reads the cache layouts {' and '.join(SUPPORTED_ISAS)} of x86 CPUs"
        )
    if config.model_config.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        yield (
            f"dtype={config.model_config.dtype} is not supported; use float32, bfloat16 or float16"
        )


def _model_problems(model: Any) -> Iterator[str]:
    name = "/".join(model.architectures)
    if model.runner_type != "generate":
        yield f"runner_type={model.runner_type!r} does not generate text; use a generative model"
        return
    if model.use_mla:
        yield f"{name}: multi-head latent attention (MLA) is not supported"
    if model.is_hybrid or model.is_attention_free or model.has_inner_state:
        yield f"{name}: models with state-space or recurrent layers are not supported"
    if model.is_encoder_decoder:
        yield f"{name}: encoder-decoder models are not supported"
    if model.uses_mrope:
        yield f"{name}: multimodal rotary positions (M-RoPE) are not supported"
    layer_types = getattr(model.hf_text_config, "layer_types", None) or ()
    if model.get_sliding_window() is not None or "sliding_attention" in layer_types:
        yield (
            f"{name}: sliding-window attention is not supported; if the model allows it, set "
            "disable_sliding_window=True"
        )
