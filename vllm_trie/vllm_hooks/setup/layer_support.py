"""What only the model's layers know of whether draft trees can be verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec


def check_layers(vllm_config: Any, layers: Mapping[str, Any]) -> None:
    """Refuse a model that has attention layers which would not see the trees, or not rightly.

    Such layers would give wrong output without any error.

    Args:
        vllm_config: the engine's configuration.
        layers: the model's layers by name (``static_forward_context``).

    Raises:
        ValueError: naming the layers.
    """
    unaware = [f"{name} ({kind})" for name, kind in _unaware(layers)]
    if unaware:
        raise ValueError(
            "these attention layers use a backend that knows nothing of draft trees: "
            f"{', '.join(unaware)}; leave attention_backend at its default or run without "
            "vllm-trie's speculative methods"
        )
    partial = [f"{name} ({kind})" for name, kind in _partial(vllm_config, layers)]
    if partial:
        raise ValueError(
            "tree attention needs full causal attention, and these layers have another kind: "
            f"{', '.join(partial)}; run this model without vllm-trie's speculative methods"
        )


def _unaware(layers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, layer in layers.items():
        if hasattr(layer, "impl") and not getattr(layer.impl, "attends_to_trees", False):
            yield name, type(layer.impl).__name__


def _partial(vllm_config: Any, layers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Layers whose metadata vLLM changes behind the backend's back (Llama 4's chunks, say)."""
    for name, layer in layers.items():
        if not hasattr(layer, "impl") or not hasattr(layer, "get_kv_cache_spec"):
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is not None and not _is_full_and_causal(spec):
            yield name, type(layer).__name__


def _is_full_and_causal(spec: Any) -> bool:
    if type(spec) is not FullAttentionSpec:
        return False
    narrowing = ("sliding_window", "attention_chunk_size", "non_causal")
    return not any(getattr(spec, name, None) for name in narrowing)
