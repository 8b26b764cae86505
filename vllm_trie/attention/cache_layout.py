"""Layout of vLLM's paged KV cache on CPUs, for the kernels named ``vec`` and ``vec16``.

One block of one KV head holds its keys column by column and then its values row by row::

    kv_cache  [num_blocks, num_kv_heads, block_size, 2 * head_size]
      = keys   [num_blocks, num_kv_heads, head_size, block_size]   first half of the block's bytes
      + values [num_blocks, num_kv_heads, block_size, head_size]   second half

Checked against vLLM's own cache-update operation by the tests.
"""

from __future__ import annotations

import torch

SUPPORTED_ISAS = ("vec", "vec16")
"""Kernels of vLLM's CPU backend whose cache has this layout."""


def split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and the values of a layer's cache; nothing is copied.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].

    Returns:
        keys [num_blocks, num_kv_heads, head_size, block_size] and
        values [num_blocks, num_kv_heads, block_size, head_size].
    """
    num_blocks, num_kv_heads, block_size, double_head_size = kv_cache.shape
    head_size = double_head_size // 2
    halves = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, head_size)
    keys = halves[:, :, :block_size].view(num_blocks, num_kv_heads, head_size, block_size)
    return keys, halves[:, :, block_size:]


def move_slots(kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the keys and values of some slots to others, in place.

    All sources are read before the first target is written, so the two sets may overlap.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], changed.
        source: int64 [n], slot = block * block_size + offset.
        target: int64 [n], distinct slots.
    """
    block_size = kv_cache.shape[2]
    keys, values = split_cache(kv_cache)
    from_block, from_offset = source // block_size, source % block_size
    to_block, to_offset = target // block_size, target % block_size
    keys[to_block, :, :, to_offset] = keys[from_block, :, :, from_offset]
    values[to_block, :, to_offset] = values[from_block, :, from_offset]
