"""After a step: the KV of the accepted nodes moves to the slots right behind the committed text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_trie.attention import TreeRow, move_slots_in_layers
from vllm_trie.attention.device_copy import to_device

MoveSlots = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]
"""Copies slots to others in the caches of several layers, see
:func:`vllm_trie.attention.move_slots_in_layers`."""


class CacheGroup(NamedTuple):
    """Layers that share block tables."""

    index: int
    """Index of vLLM's KV cache group."""
    caches: tuple[torch.Tensor, ...]
    """The group's cache tensors, each once."""
    move: MoveSlots | None = None
    """What moves slots in their layout; ``None`` for that of vLLM's CPU backend."""


def cache_groups(kv_cache_config: Any, forward_context: Any) -> list[CacheGroup]:
    """The cache tensors of every group; layers that share another's cache add nothing.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``.
        forward_context: layers by name (``static_forward_context``).
    """
    seen: set[int] = set()
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        caches, move = [], None
        for name in group.layer_names:
            cache = forward_context[name].kv_cache
            move = getattr(getattr(forward_context[name], "impl", None), "move_slots", None)
            if cache.data_ptr() not in seen:
                seen.add(cache.data_ptr())
                caches.append(cache)
        groups.append(CacheGroup(index, tuple(caches), move))
    return groups


def moved_rows(
    rows: Sequence[TreeRow], accepted: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Flat token rows whose slots the accepted nodes' KV is in, and where it must go.

    The j-th accepted node belongs into the slot of node j. Nodes are laid out likeliest path
    first, so most often there is nothing to move.

    Args:
        rows: requests with trees.
        accepted: accepted node indices of every row of the batch.
    """
    sources, targets = [], []
    for row in rows:
        first_node = row.query_start + row.num_queries - row.num_nodes
        for place, node in enumerate(accepted[row.batch_index]):
            if node != place:
                sources.append(first_node + node)
                targets.append(first_node + place)
    return sources, targets


def compact(
    groups: Sequence[CacheGroup],
    slot_mappings: Sequence[torch.Tensor],
    sources: Sequence[int],
    targets: Sequence[int],
) -> None:
    """Move KV between slots in all layers, in place.

    Args:
        groups: cache tensors, changed.
        slot_mappings: int64 [num_tokens] per group, slot of each token row of the step.
        sources, targets: token rows as :func:`moved_rows` returns them.
    """
    if not sources:
        return
    rows = np.array([sources, targets], dtype=np.int64)
    pairs = to_device(rows, slot_mappings[groups[0].index].device)
    for group in groups:
        slots = slot_mappings[group.index][pairs].long()
        (group.move or move_slots_in_layers)(group.caches, slots[0], slots[1])
