"""Layouts of vLLM's paged KV cache, and moving slots within them.

CPU (the kernels named ``vec`` and ``vec16``): one block of one KV head holds its keys column by
column and then its values row by row::

    kv_cache  [num_blocks, num_kv_heads, block_size, 2 * head_size]
      = keys   [num_blocks, num_kv_heads, head_size, block_size]   first half of the block's bytes
      + values [num_blocks, num_kv_heads, block_size, head_size]   second half

GPU (the Triton backend): the same shape, with a slot's key and then its value in the last
dimension. That one is contiguous; the order of the others in memory is vLLM's choice.

The tests compare the CPU layout with vLLM's own cache update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SUPPORTED_ISAS = ("vec", "vec16")
"""Kernels of vLLM's CPU backend whose cache has the CPU layout."""


def split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the keys and the values of a layer's CPU cache.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].

    Returns:
        Keys [num_blocks, num_kv_heads, head_size, block_size] and
        values [num_blocks, num_kv_heads, block_size, head_size].
    """
    num_blocks, num_kv_heads, block_size, double_head_size = kv_cache.shape
    head_size = double_head_size // 2
    halves = kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, head_size)
    keys = halves[:, :, :block_size].view(num_blocks, num_kv_heads, head_size, block_size)
    return keys, halves[:, :, block_size:]


def move_slots(kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the keys and values of slots to other slots of a CPU cache, in place.

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


def move_rows_in_layers(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy the keys and values of slots to other slots of every layer's GPU cache, in place.

    Args:
        kv_caches: One tensor as for `move_slots` per layer, changed; of equal block size.
        source, target: As for `move_slots`, on the caches' device.
    """
    if not kv_caches:
        return
    block_size = kv_caches[0].shape[2]
    from_block, from_offset = source // block_size, source % block_size
    to_block, to_offset = target // block_size, target % block_size
    for kv_cache in kv_caches:
        kv_cache[to_block, :, to_offset] = kv_cache[from_block, :, from_offset]
