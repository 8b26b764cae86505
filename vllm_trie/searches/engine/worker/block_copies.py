"""Queued copies of tail blocks in a CPU worker: only the slots that differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from vllm_trie.attention import copy_slots
from vllm_trie.attention.cache_layout import SUPPORTED_ISAS
from vllm_trie.hooks.ledger.record import of_beams


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
        and copy_slots(caches, _slots_to_copy(caches[0], kv_cache_block_copies))
    ):
        original(caches, num_blocks, kv_cache_block_copies)


def _slots_to_copy(cache: torch.Tensor, copies: list[Any]) -> np.ndarray:
    """Return the copies as :func:`copy_slots` takes them."""
    block_size = cache.shape[2]
    result = np.empty((len(copies), 4), dtype=np.int64)
    result[:, :2] = copies
    result[:, 2:] = 0, block_size
    ranges = getattr(copies, "ranges", None)
    if ranges is not None and _has_slots(cache.dtype, block_size, cache.shape[3] // 2):
        result[:, 2:] = [each or (0, block_size) for each in ranges]
    return result


@functools.cache
def _has_slots(dtype: torch.dtype, block_size: int, head_size: int) -> bool:
    """Return whether slots lie in vLLM's CPU cache as this package knows them."""
    from vllm.v1.attention.backends import cpu_attn

    return cpu_attn._get_attn_isa(dtype, block_size, head_size) in SUPPORTED_ISAS
