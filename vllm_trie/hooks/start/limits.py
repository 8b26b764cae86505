"""The support table: what stops draft trees, draft chains and native beam search.

Start-up chooses between trees and chains by it and refuses what neither can serve, beam search
switches itself off by it, `vllm-trie doctor` and the documentation print it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm_trie.attention.cache_layout import SUPPORTED_ISAS
from vllm_trie.hooks.start.additional_config import BEAM_SEARCH, CONFIG_KEY, own_part, spelled
from vllm_trie.refusal import turned_off

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Feature = Literal["trees", "chains", "beams"]
FEATURES: dict[Feature, str] = {
    "trees": "draft trees",
    "chains": "draft chains",
    "beams": "native beam search",
}
TREES: tuple[Feature, ...] = ("trees",)
CHAINS: tuple[Feature, ...] = ("chains",)
BEAMS: tuple[Feature, ...] = ("beams",)
DRAFTS = TREES + CHAINS
ALL = DRAFTS + BEAMS

ENV_SWITCH = "VLLM_TRIE_BEAM"
_OFF = "_vllm_trie_beams_off"
"""Attribute of a ``VllmConfig``: why the check at start-up has switched native searches off."""
RUST_SWITCH = "VLLM_USE_RUST_FRONTEND"
"""Of vLLM. Its front end in Rust loads no plugin."""
_DTYPES = ("float32", "bfloat16", "float16")
_FLOAT8_CACHES = ("fp8", "fp8_e4m3")
_REPLACED_BACKENDS = ("TRITON_ATTN", "CUSTOM")
"""Attention backends in whose place the plugin's goes."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A condition under which features do not run.

    Attributes:
        stops: The features.
        condition: Its name in the documentation, as Markdown.
        find: Takes a complete configuration and returns what meets the condition, falsy if nothing
            does.
        text: What is wrong and what to do; ``{found}`` is what `find` returned, ``{model}`` the
            model's architecture.
    """

    stops: tuple[Feature, ...]
    condition: str
    find: Callable[[Any], Any]
    text: str

    def message(self, config: VllmConfig | None) -> str | None:
        """Return what is wrong with a configuration, None if the condition is not met."""
        if not (found := self.find(config)):
            return None
        model = getattr(config, "model_config", None)
        return self.text.format(found=found, model="/".join(getattr(model, "architectures", ())))


def is_cuda() -> bool:
    """Return whether vLLM's platform is an NVIDIA GPU."""
    from vllm.platforms import current_platform as platform

    return not platform.is_cpu() and platform.is_cuda()


def _other_platform() -> str | None:
    from vllm.platforms import current_platform as platform

    return None if platform.is_cpu() or platform.is_cuda() else platform.device_type


def _other_cpu() -> str | None:
    from vllm.platforms import CpuArchEnum
    from vllm.platforms import current_platform as platform

    architecture = platform.get_cpu_architecture()
    return architecture.name if platform.is_cpu() and architecture != CpuArchEnum.X86 else None


def _is_diffusion(config: VllmConfig) -> bool:
    model = getattr(config, "model_config", None)
    has_config = getattr(config, "diffusion_config", None) is not None
    return has_config or getattr(model, "is_diffusion", False)


def _other_scheduler(config: VllmConfig) -> Any:
    if _is_diffusion(config):
        return None  # vLLM sets its own, and another row has these models
    given = config.scheduler_config.scheduler_cls
    name = given if isinstance(given, str) else getattr(given, "__module__", "")
    return None if name.startswith("vllm_trie.searches.engine.scheduler") else given


def _dtype(config: VllmConfig) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def _other_backend(config: VllmConfig) -> str | None:
    backend = config.attention_config.backend
    return None if backend is None or backend.name in _REPLACED_BACKENDS else backend.name


def _other_cache_dtype(config: VllmConfig) -> str | None:
    dtype = config.cache_config.cache_dtype
    quantization = getattr(config.model_config.hf_config, "quantization_config", None)
    if dtype == "auto" and isinstance(quantization, dict) and quantization.get("kv_cache_scheme"):
        dtype = "fp8"  # of llm-compressor's checkpoints; vLLM sets it when it makes the layers
    allowed = ("auto", *_DTYPES, *(_FLOAT8_CACHES if is_cuda() else ()))
    return None if dtype in allowed else dtype


def has_state(config: VllmConfig) -> bool:
    """Return whether layers keep a recurrent state."""
    model = config.model_config
    return bool(model.is_hybrid or model.is_attention_free or model.has_inner_state)


def _stages(config: VllmConfig) -> int:
    """Return the number of pipeline stages, 0 for one."""
    size = config.parallel_config.pipeline_parallel_size
    return size if size > 1 else 0


def _changes_v2_sampling(config: VllmConfig) -> str | None:
    """Return a setting that lets Model Runner V2 sample or report what trees do not."""
    if not config.use_v2_model_runner:
        return None
    settings = {
        "return_sampling_mask": config.model_config,
        "enable_trace_replay": config.model_config,
        "watermark_config": config,
    }
    return next((name for name, part in settings.items() if getattr(part, name, None)), None)


# fmt: off
PLATFORM_LIMITS: tuple[Limit, ...] = (
    Limit(ALL, "accelerators other than NVIDIA GPUs",
        lambda c: _other_platform(),
        "platform {found!r} is neither a CPU nor an NVIDIA GPU; vllm-trie runs on x86 CPUs and on "
        "NVIDIA GPUs"),
    Limit(TREES, "CPUs other than x86",
        lambda c: _other_cpu(),
        "CPU architecture {found} is not supported: tree attention reads the cache layouts "
        f"{', '.join(SUPPORTED_ISAS)} of x86 CPUs"),
)
"""Rows that no setting changes; their `find` does not look at the configuration."""

LIMITS: tuple[Limit, ...] = (
    # What the user set for the plugin
    Limit(BEAMS, f"`{ENV_SWITCH}=0` in the environment",
        lambda c: turned_off(ENV_SWITCH), "the environment variable {found} turns it off"),
    Limit(BEAMS, f"`{RUST_SWITCH}=1` in the environment",
        lambda c: os.environ.get(RUST_SWITCH, "0").strip() not in ("", "0"),
        f"{RUST_SWITCH}=1 lets a front end serve that loads no plugin, so that vllm-trie reads no "
        "option of a request; leave it out"),
    Limit(BEAMS, f'`"{BEAM_SEARCH}": false` in `additional_config["{CONFIG_KEY}"]`',
        lambda c: own_part(c.additional_config).get(BEAM_SEARCH) is False,
        f"{spelled(BEAM_SEARCH)}=False turns it off"),
    Limit(ALL, "a `scheduler_cls` that is not the plugin's",
        _other_scheduler,
        "scheduler_cls={found!r} cannot be used with vllm-trie's schedulers; leave scheduler_cls "
        "out"),
    # Platform
    *PLATFORM_LIMITS,
    Limit(ALL, "NVIDIA GPUs with Model Runner V1",
        lambda c: is_cuda() and not c.use_v2_model_runner,
        "Model Runner V1 is not supported on NVIDIA GPUs; leave VLLM_USE_V2_MODEL_RUNNER=0 out, "
        "or the setting for which vLLM takes V1, as its log says"),
    # Model
    Limit(ALL, "models that do not generate text",
        lambda c: c.model_config is None or c.model_config.runner_type != "generate",
        "{model}: the model does not generate text (runner_type is not 'generate'); use a "
        "generative model"),
    Limit(ALL, "encoder-decoder models",
        lambda c: c.model_config.is_encoder_decoder,
        "{model}: encoder-decoder models are not supported"),
    Limit(ALL, "diffusion models", _is_diffusion, "{model}: diffusion models are not supported"),
    Limit(ALL, "LongCat-Flash-Lite",
        lambda c: "LongcatFlashNgramForCausalLM" in (c.model_config.architectures or ()),
        "{model}: models that embed the tokens before each token are not supported: vLLM keeps "
        "those of requests, not of beams, and does not take back those of rejected drafts; run "
        "without vllm-trie's speculative methods"),
    Limit(TREES + BEAMS, "state-space, recurrent and hybrid models",
        lambda c: has_state(c),
        "{model}: models with state-space or recurrent layers are not supported"),
    Limit(CHAINS, "state-space, recurrent and hybrid models, but on NVIDIA GPUs",
        lambda c: has_state(c) and not is_cuda(),
        "{model}: models with state-space or recurrent layers need Model Runner V2 on an NVIDIA "
        "GPU. On V1 a step without drafts after one with accepted ones reads an old state "
        "(vllm-project/vllm#39273), and vLLM's kernels for CPUs keep no state for each draft "
        "token; run without vllm-trie's speculative methods"),
    Limit(TREES, "multi-head latent attention (MLA)",
        lambda c: c.model_config.use_mla,
        "{model}: multi-head latent attention (MLA) is not supported"),
    Limit(TREES, f"a `dtype` other than {', '.join(_DTYPES)}",
        lambda c: _dtype(c) not in _DTYPES and _dtype(c),
        f"dtype={{found}} is not supported; use {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}"),
    Limit(BEAMS, "a `logprobs_mode` that yields logits",
        lambda c: "logprobs" not in c.model_config.logprobs_mode and c.model_config.logprobs_mode,
        "logprobs_mode={found!r} yields no log-probabilities; use 'raw_logprobs'"),
    # Engine
    Limit(TREES + BEAMS, "pipeline parallelism", _stages,
        "pipeline_parallel_size={found} is not supported; set it to 1 (tensor parallelism works)"),
    Limit(CHAINS, "pipeline parallelism on Model Runner V1",
        lambda c: not c.use_v2_model_runner and _stages(c),
        "pipeline_parallel_size={found} is not supported on Model Runner V1, where vLLM's own "
        "n-grams do not start either; set VLLM_USE_V2_MODEL_RUNNER=1 where it runs, or set "
        "pipeline_parallel_size to 1"),
    Limit(CHAINS, "pipeline parallelism on Model Runner V2 without asynchronous scheduling",
        lambda c: c.use_v2_model_runner and not c.scheduler_config.async_scheduling and _stages(c),
        "pipeline_parallel_size={found} needs asynchronous scheduling: vLLM schedules drafts too "
        "early without it, its own n-grams too; leave async_scheduling out, or set "
        "pipeline_parallel_size to 1"),
    Limit(ALL, "context parallelism",
        lambda c: c.parallel_config.decode_context_parallel_size > 1
        or c.parallel_config.prefill_context_parallel_size > 1,
        "context parallelism is not supported; leave its sizes at 1"),
    Limit(TREES + BEAMS, "dual batch overlap",
        lambda c: c.parallel_config.use_ubatching,
        "dual batch overlap is not supported; switch it off"),
    Limit(ALL, "`enable_batch_sharded_sampling`",
        lambda c: c.parallel_config.enable_batch_sharded_sampling,
        "enable_batch_sharded_sampling is not supported: no rank has all logits of a step; leave "
        "the setting out"),
    Limit(TREES + BEAMS, "KV connectors (`kv_transfer_config`)",
        lambda c: c.kv_transfer_config is not None,
        "KV connectors (kv_transfer_config) are not supported: they could send KV of nodes and "
        "rows that are dropped; leave the setting out"),
    Limit(BEAMS, "encoder-cache connectors (`ec_transfer_config`)",
        lambda c: getattr(c, "ec_transfer_config", None) is not None,
        "encoder-cache connectors (ec_transfer_config) are not supported; leave the setting out"),
    Limit(BEAMS, "`enable_return_routed_experts`",
        lambda c: c.aux_output_config.enable_return_routed_experts,
        "enable_return_routed_experts is not supported: vLLM keeps the experts of requests, not of "
        "beams; leave the setting out"),
    Limit(TREES, "`kv_sharing_fast_prefill`",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "kv_sharing_fast_prefill is not supported; switch it off"),
    Limit(TREES, "a quantized KV cache, except for `fp8` and `fp8_e4m3` on a GPU",
        _other_cache_dtype,
        "kv_cache_dtype={found!r} is not supported; use 'auto', or 'fp8' on a GPU"),
    Limit(TREES, "on Model Runner V2: `return_sampling_mask`, `enable_trace_replay`, "
        "`watermark_config`",
        _changes_v2_sampling,
        "{found} is not supported with trees on Model Runner V2; leave it out"),
    Limit(TREES, "a KV cache of another dtype than the model's",
        lambda c: c.cache_config.cache_dtype in set(_DTYPES) - {_dtype(c)}
        and c.cache_config.cache_dtype,
        "kv_cache_dtype={found!r} is not the model's dtype; use 'auto'"),
    # GPU settings
    Limit(TREES, "on a GPU: an `attention_backend` other than `TRITON_ATTN`",
        lambda c: is_cuda() and _other_backend(c),
        "attention_backend={found!r} knows nothing of draft trees; leave it out or set it to "
        "'TRITON_ATTN'"),
    Limit(TREES, "on a GPU: `backend_per_kind`",
        lambda c: is_cuda() and c.attention_config.backend_per_kind,
        "backend_per_kind={found!r} is not supported; leave it out"),
)
# fmt: on


def problems(feature: Feature, config: VllmConfig) -> Iterator[str]:
    """Yield the message of each row that stops a feature.

    Lazy, since a row may rely on those before it: on there being a model, for one.
    """
    for limit in LIMITS:
        if feature in limit.stops and (message := limit.message(config)):
            yield message


def reason_off(vllm_config: VllmConfig) -> str | None:
    """Return why native beam search does not serve this engine, None if it does.

    The front end and the engine's process come to the same answer: from the configuration, and
    from what :func:`switch_off` has written into it in both.
    """
    return getattr(vllm_config, _OFF, None) or next(problems("beams", vllm_config), None)


def switch_off(vllm_config: VllmConfig, reason: str | None) -> None:
    """Have native beam search not serve this engine, for what showed at its start."""
    setattr(vllm_config, _OFF, reason)
