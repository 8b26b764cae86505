"""What tree speculation does not support, refused at start-up with the setting's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from vllm_trie.attention.cache_layout import SUPPORTED_ISAS
from vllm_trie.vllm_hooks.ledger.extension_points import offered

_DTYPES = ("float32", "bfloat16", "float16")
_REPLACED_BACKENDS = ("TRITON_ATTN", "CUSTOM")
"""Attention backends in whose place ours goes."""


def check_supported(vllm_config: Any, method: str, allow_untested_gpu: bool = False) -> None:
    """Refuse a configuration that tree verification cannot serve.

    Args:
        vllm_config: the engine's configuration.
        method: the method's name, for the message.
        allow_untested_gpu: what the user set.

    Raises:
        ValueError: every reason at once, each with what to do.
    """
    problems = list(_problems(vllm_config, allow_untested_gpu))
    if problems:
        raise ValueError(
            f"speculative method {method!r} of vllm-trie cannot run with this configuration:\n- "
            + "\n- ".join(problems)
        )


def _problems(config: Any, allow_untested_gpu: bool) -> Iterator[str]:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        yield from _cpu_problems()
    else:
        yield from _gpu_problems(config, allow_untested_gpu)
    if str(config.model_config.dtype).removeprefix("torch.") not in _DTYPES:
        yield f"dtype={config.model_config.dtype} is not supported; use {_or(_DTYPES)}"
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
    if config.cache_config.cache_dtype not in ("auto", *_DTYPES):
        yield f"kv_cache_dtype={config.cache_config.cache_dtype!r} is not supported; use 'auto'"
    if config.use_v2_model_runner:
        yield (
            "Model Runner V2 is not supported; unset VLLM_USE_V2_MODEL_RUNNER (vLLM then chooses "
            "V1 by itself)"
        )


def _cpu_problems() -> Iterator[str]:
    from vllm.platforms import CpuArchEnum, current_platform

    if current_platform.get_cpu_architecture() != CpuArchEnum.X86:
        yield (
            f"CPU architecture {current_platform.get_cpu_architecture().name} is not supported: "
            f"tree attention reads the cache layouts {' and '.join(SUPPORTED_ISAS)} of x86 CPUs"
        )


def _gpu_problems(config: Any, allowed: bool) -> Iterator[str]:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        yield (
            f"platform {current_platform.device_name!r} has no tree attention; tree speculation "
            "runs on x86 CPUs and, untested, on NVIDIA GPUs"
        )
        return
    if offered("draft_verifier"):
        yield "a patched vLLM verifies trees on CPUs only; on a GPU, run stock vLLM"
        return
    if not allowed:
        yield (
            "allow_untested_gpu=False: tree speculation has never run on a GPU. What is known: its "
            "Triton kernel gives exact results and a whole engine the right tokens in Triton's "
            "interpreter on a CPU, and it compiles for compute capabilities 7.5 to 12.0. Set "
            "allow_untested_gpu=True beside the method to try it: the engine then compares tree "
            "attention with exact results on your device at start-up, and does not start if they "
            "differ. Else run on an x86 CPU, or without vllm-trie's speculative methods"
        )
        return
    yield from _gpu_setting_problems(config)


def _gpu_setting_problems(config: Any) -> Iterator[str]:
    from vllm.config import CUDAGraphMode

    attention = config.attention_config
    if attention.backend is not None and attention.backend.name not in _REPLACED_BACKENDS:
        yield (
            f"attention_backend={attention.backend.name!r} knows nothing of draft trees; leave it "
            "out or set it to 'TRITON_ATTN'"
        )
    if attention.backend_per_kind:
        yield f"backend_per_kind={attention.backend_per_kind!r} is not supported; leave it out"
    cache_dtype = config.cache_config.cache_dtype
    model_dtype = str(config.model_config.dtype).removeprefix("torch.")
    if cache_dtype in _DTYPES and cache_dtype != model_dtype:  # others are refused everywhere
        yield (
            f"kv_cache_dtype={cache_dtype!r} is not the model's {config.model_config.dtype}; use "
            "'auto'"
        )
    if config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL:
        yield (
            "cudagraph_mode='FULL' would capture attention without trees; leave it out or set it "
            "to 'PIECEWISE'"
        )


def _or(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"


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
    if chunk_size := getattr(model, "attention_chunk_size", None):
        yield (
            f"{name}: attention in chunks (attention_chunk_size={chunk_size}) is not supported; "
            "run this model without vllm-trie's speculative methods"
        )
