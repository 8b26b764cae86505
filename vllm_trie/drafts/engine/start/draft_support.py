"""How an engine verifies drafts, and the layers and states it cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_trie.drafts.engine.config import Verification
from vllm_trie.hooks.start.limits import is_cuda, problems, reason_off
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

logger = init_logger(f"vllm.{__name__}")

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

    Such layers would give wrong output without any error. Those of a trained drafter see no trees.

    Args:
        vllm_config: The engine's configuration.
        layers: The model's layers by name (``static_forward_context``).

    Raises:
        RefusedError: Naming the layers.
    """
    attention = {
        name: layer
        for name, layer in layers.items()
        if hasattr(layer, "impl") and not getattr(layer, "is_draft_layer", False)
    }
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
    others = [
        f"{name} ({type(layer).__name__})"
        for name, layer in attention.items()
        if hasattr(layer, "get_kv_cache_spec") and _is_other(layer.get_kv_cache_spec(vllm_config))
    ]
    if others:
        raise RefusedError(
            "tree attention needs causal attention, full, in windows or in chunks, and these "
            f"layers have another kind: {', '.join(others)}; set verification='chain' for this "
            "model"
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


def _is_other(spec: KVCacheSpec | None) -> bool:
    """Return whether a layer has attention that tree attention lacks."""
    kinds = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
    return spec is not None and (type(spec) not in kinds or getattr(spec, "non_causal", False))
