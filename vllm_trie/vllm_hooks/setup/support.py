"""What the support table and the model's layers mean for an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_trie.vllm_hooks.setup.config_keys import ALLOW_GPU, Verification
from vllm_trie.vllm_hooks.setup.limits import (
    PLATFORM_LIMITS,
    UNTESTED_LIMITS,
    is_cuda,
    problems,
    switched_off,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import BeamSearchParams, SamplingParams
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

__all__ = [
    "beam_slots",
    "cache_reason",
    "check_layers",
    "check_states",
    "choose_verification",
    "reason_for_stock_search",
    "reason_off",
    "reason_sampler_selects",
    "say_where_untested",
    "switched_off",
    "unsupported_rule",
]

logger = init_logger(__name__)

_STATES_OF_DRAFTS = ("GDN_ATTN", "MAMBA2", "SHORT_CONV")
_TREES_ON_V2 = (
    "on a GPU and on Model Runner V2 they are untested; verification='tree' switches them on"
)


# -- drafts --------------------------------------------------------------------------------------


def choose_verification(
    vllm_config: VllmConfig, method: str, asked: Verification
) -> Literal["tree", "chain"]:
    """Return how the engine verifies drafts.

    Args:
        vllm_config: the engine's configuration.
        method: the method's name, for the messages.
        asked: the option; ``"auto"`` takes trees where they are supported, chains elsewhere.

    Raises:
        ValueError: the configuration serves neither, or not the one that was asked for; every
            reason at once, each with what to do.
    """
    against_trees = list(problems("trees", vllm_config))
    against_chains = list(problems("chains", vllm_config))
    if asked == "auto" and (vllm_config.use_v2_model_runner or is_cuda()):
        against_trees = [_TREES_ON_V2]
    chosen = asked if asked != "auto" else "chain" if against_trees else "tree"
    if found := against_trees if chosen == "tree" else against_chains:
        if chosen == "tree" and not against_chains:
            found.append("verification='chain' runs here: drafts without branches")
        raise ValueError(
            f"speculative method {method!r} of vllm-trie cannot run with this configuration:\n- "
            + "\n- ".join(found)
        )
    assert vllm_config.speculative_config is not None
    reasons = f" Trees cannot run here: {'; '.join(against_trees)}" if against_trees else ""
    logger.info(
        "vllm-trie is on: %s drafts up to %d tokens a request, verified as %ss, on Model Runner "
        "V%d with%s asynchronous scheduling; native beam search is %s.%s",
        method,
        vllm_config.speculative_config.num_speculative_tokens,
        chosen,
        1 + bool(vllm_config.use_v2_model_runner),
        "" if vllm_config.scheduler_config.async_scheduling else "out",
        "off" if reason_off(vllm_config) else "on",
        reasons if asked == "auto" else "",
    )
    if is_cuda():
        logger.warning_once(
            "vllm-trie has not run on any GPU yet. At its start this engine decodes a few prompts "
            "with and without drafts, and serves without drafts if they fail, change the output or "
            "are slower. Please report how it went, with what `vllm-trie doctor` prints."
        )
    return chosen


def check_layers(vllm_config: VllmConfig, layers: Mapping[str, Any]) -> None:
    """Refuse a model with attention layers that would ignore the trees or mask them wrongly.

    Such layers would give wrong output without any error.

    Args:
        vllm_config: the engine's configuration.
        layers: the model's layers by name (``static_forward_context``).

    Raises:
        ValueError: naming the layers.
    """
    attention = {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}
    unaware = [
        f"{name} ({type(layer.impl).__name__})"
        for name, layer in attention.items()
        if not getattr(layer.impl, "attends_to_trees", False)
    ]
    if unaware:
        raise ValueError(
            "these attention layers use a backend that knows nothing of draft trees: "
            f"{', '.join(unaware)}; leave attention_backend at its default or set "
            "verification='chain'"
        )
    partial = [
        f"{name} ({type(layer).__name__})"
        for name, layer in attention.items()
        if hasattr(layer, "get_kv_cache_spec") and _is_partial(layer.get_kv_cache_spec(vllm_config))
    ]
    if partial:
        raise ValueError(
            "tree attention needs full causal attention, and these layers have another kind: "
            f"{', '.join(partial)}; set verification='chain' for this model"
        )


def check_states(kv_cache_config: KVCacheConfig) -> None:
    """Refuse a model with recurrent state that vLLM does not take back after rejected drafts.

    Model Runner V2 tells the numbers of accepted tokens to the layers of these kinds alone.

    Raises:
        ValueError: naming the layers and the kind of their state.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec) and spec.mamba_type.name not in _STATES_OF_DRAFTS:
            raise ValueError(
                f"the recurrent layers {', '.join(group.layer_names)} are of kind "
                f"{spec.mamba_type.name}, whose state vLLM's Model Runner V2 does not take back "
                f"after rejected drafts (it does for {', '.join(_STATES_OF_DRAFTS)}); run this "
                "model without vllm-trie's speculative methods"
            )


def _is_partial(spec: KVCacheSpec | None) -> bool:
    """Return whether vLLM changes the metadata behind the backend's back (Llama 4's chunks)."""
    narrowing = ("sliding_window", "attention_chunk_size", "non_causal")
    return spec is not None and (
        type(spec) is not FullAttentionSpec or any(getattr(spec, n, None) for n in narrowing)
    )


# -- beams ---------------------------------------------------------------------------------------


def reason_off(vllm_config: VllmConfig) -> str | None:
    """Return why native beam search does not serve this engine, None if it does.

    A pure function of the configuration: the front end and the engine's process come to the same
    answer.
    """
    return next(problems("beams", vllm_config), None)


def reason_for_stock_search(vllm_config: VllmConfig, params: BeamSearchParams) -> str | None:
    """Return why only vLLM's own search can serve the parameters, None if the native one can."""
    if reason := reason_off(vllm_config):
        return reason
    return unsupported_rule(vllm_config, params)


def reason_sampler_selects(vllm_config: VllmConfig) -> str | None:
    """Return why rows need vLLM's sampler for candidates; None if the worker can select them.

    The hook in the worker must see one row of logits for each request, in the batch's order.
    """
    if vllm_config.speculative_config is not None:
        return "speculative decoding"
    if vllm_config.parallel_config.enable_batch_sharded_sampling:
        return "enable_batch_sharded_sampling"
    return None


def unsupported_rule(
    vllm_config: VllmConfig, params: SamplingParams | BeamSearchParams
) -> str | None:
    """Return why the native search cannot serve the bias, mask or grammar of these parameters."""
    given = {
        name
        for name, unset in (
            ("logit_bias", (None, {})),
            ("allowed_token_ids", (None,)),  # of BeamSearchParams since vLLM 0.33
            ("structured_outputs", (None,)),
        )
        if getattr(params, name, None) not in unset
    }
    if given and (reason := reason_sampler_selects(vllm_config)):
        return f"{min(given)} is not supported with {reason}"
    if "structured_outputs" in given:
        outputs = vllm_config.structured_outputs_config
        if outputs.reasoning_parser and not outputs.enable_in_reasoning:
            return (
                "structured_outputs is not supported with reasoning_parser="
                f"{outputs.reasoning_parser!r}, after whose reasoning the grammar would begin"
            )
        if params.ignore_eos:
            return "structured_outputs is not supported with ignore_eos: a grammar ends with EOS"
    return None


def beam_slots(vllm_config: VllmConfig) -> int:
    """Return the largest number of requests that the engine runs at once."""
    scheduler = vllm_config.scheduler_config
    active = getattr(scheduler, "max_num_active_seqs", None)
    return scheduler.max_num_seqs if active is None else min(scheduler.max_num_seqs, active)


def say_where_untested(vllm_config: VllmConfig) -> None:
    """Log one line at start-up on a platform that beam search was not tested on."""
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
    elif reason in problems("beams", vllm_config, PLATFORM_LIMITS + UNTESTED_LIMITS):
        logger.info("Native beam search is off, vLLM's own serves: %s", reason)


def cache_reason(kv_cache_config: KVCacheConfig) -> str | None:
    """Return why rows cannot share and copy KV blocks of this cache, None if they can.

    A model's cache says what its configuration may not: only groups that keep every token of a
    request, one state each, can be forked block by block.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {"": spec}
        for each in specs.values():
            if type(each) not in (FullAttentionSpec, MLAAttentionSpec):
                return f"KV cache of kind {type(each).__name__} is not supported"
            if getattr(each, "tokens_per_state", 1) != 1:
                return "compressed KV cache (several tokens in one state) is not supported"
    return None
