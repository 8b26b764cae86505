"""How an engine verifies drafts, and the layers, states and trained drafters it cannot serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_trie.hooks.start.config import Verification
from vllm_trie.hooks.start.limits import is_cuda, problems
from vllm_trie.refusal import RefusedError
from vllm_trie.searches.engine.beam_support import reason_off

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from vllm_trie.extras.union.neural import NeuralOptions

logger = init_logger(__name__)

_STATES_OF_DRAFTS = ("GDN_ATTN", "MAMBA2", "SHORT_CONV")
_CHAINS_ON_V2 = "on Model Runner V2 chains are the default; verification='tree' asks for trees"


def choose_verification(
    vllm_config: VllmConfig, method: str, asked: Verification
) -> Literal["tree", "chain"]:
    """Return how the engine verifies drafts.

    Args:
        vllm_config: The engine's configuration.
        method: The method's name, for the messages.
        asked: The option; ``"auto"`` takes trees where they are supported, chains elsewhere.

    Raises:
        RefusedError: The configuration serves neither, or not the one that was asked for; every
            reason at once, each with what to do.
    """
    against_trees = list(problems("trees", vllm_config))
    against_chains = list(problems("chains", vllm_config))
    if asked == "auto" and vllm_config.use_v2_model_runner:
        against_trees = [_CHAINS_ON_V2]
    chosen = asked if asked != "auto" else "chain" if against_trees else "tree"
    if reasons := against_trees if chosen == "tree" else against_chains:
        if chosen == "tree" and not against_chains:
            reasons.append("verification='chain' runs here: drafts without branches")
        raise RefusedError(
            f"speculative method {method!r} of vllm-trie cannot run with this configuration:\n- "
            + "\n- ".join(reasons)
        )
    assert vllm_config.speculative_config is not None
    why_no_trees = f" No trees: {'; '.join(against_trees)}" if against_trees else ""
    logger.info(
        "vllm-trie is on: %s drafts up to %d tokens a request, verified as %ss, on Model Runner "
        "V%d with%s asynchronous scheduling; native beam search is %s.%s",
        method,
        vllm_config.speculative_config.num_speculative_tokens,
        chosen,
        1 + bool(vllm_config.use_v2_model_runner),
        "" if vllm_config.scheduler_config.async_scheduling else "out",
        "off" if reason_off(vllm_config) else "on",
        why_no_trees if asked == "auto" else "",
    )
    if is_cuda():
        logger.info_once(
            "vllm-trie: at its start this engine decodes a few prompts with and without drafts, "
            "and serves without drafts if they fail, change the output or are slower."
        )
    return chosen


def check_layers(vllm_config: VllmConfig, layers: Mapping[str, object]) -> None:
    """Refuse a model with attention layers that would ignore the trees or mask them wrongly.

    Such layers would give wrong output without any error.

    Args:
        vllm_config: The engine's configuration.
        layers: The model's layers by name (``static_forward_context``).

    Raises:
        RefusedError: Naming the layers.
    """
    attention = {name: layer for name, layer in layers.items() if hasattr(layer, "impl")}
    unaware = [
        f"{name} ({type(layer.impl).__name__})"
        for name, layer in attention.items()
        if not getattr(layer.impl, "attends_to_trees", False)
    ]
    if unaware:
        raise RefusedError(
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
        raise RefusedError(
            "tree attention needs full causal attention, and these layers have another kind: "
            f"{', '.join(partial)}; set verification='chain' for this model"
        )


def check_states(kv_cache_config: KVCacheConfig) -> None:
    """Refuse a model with recurrent state that vLLM does not take back after rejected drafts.

    Model Runner V2 tells the numbers of accepted tokens to the layers of these kinds alone.

    Raises:
        RefusedError: Naming the layers and the kind of their state.
    """
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, MambaSpec) and spec.mamba_type.name not in _STATES_OF_DRAFTS:
            raise RefusedError(
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


# -- trained drafters ------------------------------------------------------------------------------


def check_trained_drafter(
    vllm_config: VllmConfig, neural: NeuralOptions, asked: Verification
) -> None:
    """Refuse a complete configuration that the trained drafter cannot draft in.

    Args:
        vllm_config: Of the engine.
        neural: The trained drafter.
        asked: The option `verification`.

    Raises:
        RefusedError: Every reason at once.
    """
    if reasons := [
        *_runner_problems(vllm_config, asked),
        *_problems(vllm_config, neural),
    ]:
        raise RefusedError(
            f"trie_union cannot run with {{'method': {neural.method!r}}} among its drafters here:"
            "\n- " + "\n- ".join(reasons)
        )


def _runner_problems(vllm_config: VllmConfig, asked: Verification) -> Iterator[str]:
    speculative: Any = vllm_config.speculative_config
    if not vllm_config.use_v2_model_runner:
        yield (
            "this engine runs on Model Runner V1, and trained drafters in a union need V2; run on "
            "an NVIDIA GPU without VLLM_USE_V2_MODEL_RUNNER=0, or leave trie_union out for vLLM's "
            f"own method {speculative.method!r}"
        )
    if asked == "tree":
        yield "vLLM's speculators read chains; leave verification='tree' out"
    if speculative.use_multi_module_mtp():
        yield "MTP with several modules is not supported; use vLLM's own method 'mtp'"


def _problems(vllm_config: VllmConfig, neural: NeuralOptions) -> Iterator[str]:
    speculative: Any = vllm_config.speculative_config
    parallel = vllm_config.parallel_config
    if speculative.method != neural.method:
        yield (
            f"vLLM takes the checkpoint {neural.model!r} for method {speculative.method!r}; write "
            f"'method': {speculative.method!r} if it is allowed, or rename the folder, whose name "
            "vLLM goes by"
        )
    elif speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp():
        yield (
            "the MTP layers of this model share the model's KV cache, which the plugin does not "
            "handle; use vLLM's own method 'mtp' without trie_union"
        )
    for name, instead in (
        ("data_parallel_size", "start one engine for each replica"),
        ("tensor_parallel_size", "use vLLM's own method on several devices"),
        ("pipeline_parallel_size", "use vLLM's own method on several devices"),
    ):
        if (size := getattr(parallel, name)) > 1:
            # A drafter that one rank alone gives up would leave the others waiting for it.
            yield f"{name}={size} is not supported; set it to 1, or {instead}"
    if vllm_config.kv_transfer_config is not None:
        yield "KV connectors (kv_transfer_config) are not supported; leave the setting out"
    if vllm_config.model_config.supports_multimodal_inputs:
        yield "models with multimodal inputs are not supported; use a text model"
    if speculative.draft_model_config.uses_mrope:
        yield "drafters with multimodal rotary positions (M-RoPE) are not supported"
    for name, allowed in (
        ("parallel_drafting", False),
        ("draft_sample_method", "greedy"),
        ("rejection_sample_method", "standard"),
        ("use_local_argmax_reduction", False),
        ("enable_adaptive_verification", False),
    ):
        if (value := getattr(speculative, name)) != allowed:
            yield f"{name}={value!r} is not supported; leave it out or set it to {allowed!r}"
