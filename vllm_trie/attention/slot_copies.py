"""Copies of the filled slots of blocks, on CPUs: the native kernel and its readable twin."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vllm_trie.attention.cache_layout import split_cache
from vllm_trie.native import DEFAULT_FLAGS, SHARED_HEADERS, NativeLibrary

_SOURCE = Path(__file__).parent / "cpu" / "copy_slots.cpp"
LIBRARY = NativeLibrary(
    "block-copies", "copies of KV blocks", [_SOURCE], SHARED_HEADERS, DEFAULT_FLAGS
)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def copy_slots(caches: Sequence[torch.Tensor], copies: np.ndarray) -> bool:
    """Copy slots of blocks to the same slots of other blocks in every layer, in place.

    Args:
        caches: One tensor per layer, [num_blocks, num_kv_heads, block_size, 2 * head_size], in the
            layout of :mod:`~vllm_trie.attention.cache_layout`; ranges of whole blocks need only
            its strides.
        copies: int64 [n, 4], source block, target block, first slot and end of the range. No
            target is the source of another copy.

    Returns:
        False, with nothing done, if the shapes, strides or dtypes are none of vLLM's or the kernel
        could not be built.
    """
    first = caches[0]
    if not all(_alike(cache, first) for cache in caches) or not (kernel := _kernel()):
        return False
    _, num_kv_heads, block_size, double_head_size = first.shape
    copies = np.ascontiguousarray(copies, dtype=np.int64)
    size = first.element_size()
    kernel(
        (ctypes.c_void_p * len(caches))(*[cache.data_ptr() for cache in caches]),
        len(caches),
        first.stride(0) * size,
        first.stride(1) * size,
        num_kv_heads,
        block_size,
        double_head_size // 2,
        size,
        copies.ctypes.data,
        len(copies),
        torch.get_num_threads(),
    )
    return True


def copy_slots_portable(caches: Sequence[torch.Tensor], copies: np.ndarray) -> None:
    """Do what :func:`copy_slots` does, with torch operations, to be read and compared with."""
    for cache in caches:
        keys, values = split_cache(cache)
        for source, target, first, end in copies.tolist():
            keys[target, :, :, first:end] = keys[source, :, :, first:end]
            values[target, :, first:end] = values[source, :, first:end]


def _alike(cache: torch.Tensor, first: torch.Tensor) -> bool:
    return (
        cache.ndim == 4
        and cache.device.type == "cpu"
        and cache.dtype in _FLOATS
        and cache.shape == first.shape
        and cache.dtype == first.dtype
        and cache.stride() == first.stride()
        and cache.is_contiguous()
    )


@functools.cache
def _kernel() -> ctypes._NamedFuncPointer | None:
    return LIBRARY.require().vllm_trie_copy_slots if LIBRARY.is_available() else None
