"""Layouts of vLLM's paged KV cache, and moving slots within them.

CPU: a cache is [num_blocks, num_kv_heads, block_size, 2 * head_size]; the first half of a block's
bytes of one KV head are keys, the second half values. With the kernels named ``vec`` and ``vec16``
these are columns and rows::

    keys    [head_size, block_size]
    values  [block_size, head_size]

With ``amx``, in bfloat16 and with sizes of a multiple of 32, they are pairs::

    keys    [block_size / 16, head_size / 2, 16 slots, 2 numbers]
    values  [head_size / 16, block_size / 2, 16 numbers, 2 slots]

GPU (the Triton backend): the same shape, with a slot's key and then its value in the last
dimension. That one is contiguous; the order of the others in memory is vLLM's choice.

The tests compare the CPU layouts with vLLM's own cache update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SUPPORTED_ISAS = ("vec", "vec16", "amx")
"""Kernels of vLLM's CPU backend whose cache has one of the CPU layouts."""


def slot_elements(
    isa: str, block_size: int, head_size: int, device: torch.device | None = None
) -> torch.Tensor:
    """Return where a slot's key, and behind it its value, lies among the elements of its block.

    Args:
        isa: One of :data:`SUPPORTED_ISAS`.
        device: Of the result; the host if it is None.

    Returns:
        int64 [block_size, 2 * head_size].
    """
    slot = torch.arange(block_size, device=device)[:, None]
    d = torch.arange(head_size, device=device)
    if isa == "amx":
        key = slot // 16 * 16 * head_size + d // 2 * 32 + slot % 16 * 2 + d % 2
        value = d // 16 * 16 * block_size + slot // 2 * 32 + d % 16 * 2 + slot % 2
    else:
        key = d * block_size + slot
        value = slot * head_size + d
    return torch.cat([key, block_size * head_size + value], dim=1)


def split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the keys and the values of a layer's CPU cache of ``vec`` or ``vec16``.

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


def move_slots(
    kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor, isa: str = "vec"
) -> None:
    """Copy the keys and values of slots to other slots of a CPU cache, in place.

    All sources are read before the first target is written, so the two sets may overlap.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], changed.
        source: int64 [n], slot = block * block_size + offset.
        target: int64 [n], distinct slots.
        isa: The kernel whose cache it is.
    """
    block_size, double_head_size = kv_cache.shape[2:]
    elements = slot_elements(isa, block_size, double_head_size // 2, kv_cache.device)
    blocks = kv_cache.flatten(2)
    of_source = source[:, None] // block_size, slice(None), elements[source % block_size]
    of_target = target[:, None] // block_size, slice(None), elements[target % block_size]
    blocks[of_target] = blocks[of_source]


def move_rows_in_layers(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy the keys and values of slots to other slots of every layer's GPU cache, in place.

    Args:
        kv_caches: One tensor as for `move_slots` per layer, changed; of equal block size.
        source, target: As for `move_slots`, on the caches' device.
    """
    block_size = kv_caches[0].shape[2]
    from_block, from_offset = source // block_size, source % block_size
    to_block, to_offset = target // block_size, target % block_size
    for kv_cache in kv_caches:
        kv_cache[to_block, :, to_offset] = kv_cache[from_block, :, from_offset]
