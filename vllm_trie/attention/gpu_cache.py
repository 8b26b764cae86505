"""Layout of vLLM's paged KV cache in its Triton backend: a slot's key, then its value.

::

    kv_cache  [num_blocks, num_kv_heads, block_size, 2 * head_size]

The last dimension is contiguous; the order of the others in memory is vLLM's choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def move_rows_in_layers(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy the keys and values of some slots to others in every layer, in place.

    In each layer all sources are read before a target is written, so the two sets may overlap.

    Args:
        kv_caches: one tensor [num_blocks, num_kv_heads, block_size, 2 * head_size] per layer,
            changed. All have the same block size.
        source: int64 [n] on the caches' device, slot = block * block_size + offset.
        target: int64 [n], distinct slots.
    """
    if not kv_caches:
        return
    block_size = kv_caches[0].shape[2]
    from_block, from_offset = source // block_size, source % block_size
    to_block, to_offset = target // block_size, target % block_size
    for kv_cache in kv_caches:
        kv_cache[to_block, :, to_offset] = kv_cache[from_block, :, from_offset]
