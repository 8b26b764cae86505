"""Queued copies of tail blocks in a CPU worker: only the slots that differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from vllm_trie.attention import choose_kernels
from vllm_trie.hooks.ledger.record import of_beams
from vllm_trie.hooks.start.cpu_cache import is_readable


@of_beams("v1.worker.gpu_model_runner:").wraps(
    "copy_kv_cache_blocks_inplace",
    "copies the slots of tail blocks that differ; vLLM's copies whole blocks bytewise",
    platform="cpu",
)
def copy_kv_cache_blocks_inplace(
    original: Callable[..., None],
    kv_caches: Iterable[torch.Tensor],
    num_blocks: int,
    kv_cache_block_copies: list[object],
) -> None:
    caches = list({cache.data_ptr(): cache for cache in kv_caches}.values())
    if not (
        kv_cache_block_copies
        and caches
        and caches[0].shape[0] == num_blocks
        and _copy(caches, kv_cache_block_copies)
    ):
        original(caches, num_blocks, kv_cache_block_copies)


def _copy(caches: list[torch.Tensor], copies: list[Any]) -> bool:
    """Copy what the kernel can; whole blocks where it is unknown how slots lie."""
    block_size, double_head_size = caches[0].shape[2:]
    isa = _isa_of_slots(caches[0].dtype, block_size, double_head_size // 2)
    result = np.empty((len(copies), 4), dtype=np.int64)
    result[:, :2] = copies
    result[:, 2:] = 0, block_size
    ranges = getattr(copies, "ranges", None)
    if ranges is not None and isa:
        result[:, 2:] = [each or (0, block_size) for each in ranges]
    return choose_kernels().copy_slots(caches, result, isa or "vec")


@functools.cache
def _isa_of_slots(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    """Return vLLM's kernel, or an empty string if this package does not know its cache layout."""
    from vllm.v1.attention.backends import cpu_attn

    isa = cpu_attn._get_attn_isa(dtype, block_size, head_size)
    return isa if is_readable(isa) else ""
