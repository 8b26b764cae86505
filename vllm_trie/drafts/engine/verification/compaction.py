"""After a step: the KV of the accepted nodes moves to the slots right behind the committed text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from vllm_trie.attention import TreeRow, move_slots_in_layers

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

MoveSlots = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]
"""Copies slots to others in the caches of several layers, see
:func:`vllm_trie.attention.move_slots_in_layers`."""


class CacheGroup(NamedTuple):
    """Layers that share block tables."""

    group_id: int
    """Index of vLLM's KV cache group."""
    caches: tuple[torch.Tensor, ...]
    """The group's cache tensors, each once."""
    move: MoveSlots
    """Moves slots in their layout."""


def moves_of(isa: str) -> MoveSlots:
    """Return what moves slots in the layout of a kernel of vLLM's CPU backend."""
    return lambda caches, source, target: move_slots_in_layers(caches, source, target, isa)


def cache_groups(kv_cache_config: KVCacheConfig, layers: dict[str, Any]) -> list[CacheGroup]:
    """Return the cache tensors of every group; layers that share another's cache add nothing.

    Nor do those of a trained drafter, which computes the KV of accepted tokens itself. A group
    whose layers have several kernels is returned once for each of them.

    Args:
        kv_cache_config: Of the engine. Groups may share their tensors, in blocks of their own.
        layers: By name (``static_forward_context``); others are left out, and groups without any.
    """
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        group_layers = [
            layers[name]
            for name in group.layer_names
            if name in layers and not getattr(layers[name], "is_draft_layer", False)
        ]
        if group_layers:
            move = getattr(getattr(group_layers[0], "impl", None), "move_slots", None)
            by_isa: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
            for layer in group_layers:
                isa = getattr(layer, "isa", "vec")
                by_isa[isa][layer.kv_cache.data_ptr()] = layer.kv_cache
            for isa, caches in by_isa.items():
                groups.append(CacheGroup(index, tuple(caches.values()), move or moves_of(isa)))
    return groups


def moved_tokens(rows: Sequence[TreeRow], accepted: Sequence[Sequence[int]]) -> np.ndarray:
    """Return int64 [2, n], the query tokens whose KV moves, and those whose slots it moves to.

    The j-th accepted node belongs into the slot of node j. Nodes are laid out likeliest path
    first, so most often nothing moves.

    Args:
        rows: Requests with trees.
        accepted: Accepted node indices of every request of the batch.
    """
    sources, targets = [], []
    for row in rows:
        first_node = row.query_start + row.num_queries - row.num_nodes
        for place, node in enumerate(accepted[row.batch_index]):
            if node != place:
                sources.append(first_node + node)
                targets.append(first_node + place)
    return np.array([sources, targets], dtype=np.int64)


def compact(
    groups: Sequence[CacheGroup],
    slot_mappings: Sequence[torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Move KV between slots in all layers, in place, without waiting for a device.

    Args:
        groups: Cache tensors, changed.
        slot_mappings: int64 [num_tokens] by group id, the slot of each query token.
        source, target: int64 [n], query tokens as :func:`moved_tokens` returns them; a pair may
            also be the same token twice.
    """
    for group in groups:
        slots = slot_mappings[group.group_id]
        group.move(group.caches, slots[source].long(), slots[target].long())
