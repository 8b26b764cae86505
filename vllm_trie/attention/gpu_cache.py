"""Layout of vLLM's paged KV cache in its Triton backend: a slot's key, then its value.

::

    kv_cache  [num_blocks, num_kv_heads, block_size, 2 * head_size]

The last dimension is contiguous; the order of the others in memory is vLLM's choice.
"""

from __future__ import annotations

import torch


def move_rows(kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the keys and values of some slots to others, in place.

    All sources are read before the first target is written, so the two sets may overlap.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], changed.
        source: int64 [n] on the cache's device, slot = block * block_size + offset.
        target: int64 [n], distinct slots.
    """
    block_size = kv_cache.shape[2]
    moved = kv_cache[source // block_size, :, source % block_size]
    kv_cache[target // block_size, :, target % block_size] = moved
