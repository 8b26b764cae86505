"""Queued copies of tail blocks in a CPU worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from vllm_trie.attention import choose_kernels
from vllm_trie.hooks.ledger.record import of_beams
from vllm_trie.searches.engine.search_wire import block_pairs


@of_beams("v1.worker.gpu_model_runner:").wraps(
    "copy_kv_cache_blocks_inplace",
    "copies blocks at memory's speed; vLLM's goes byte by byte, 12 to 18 times slower",
    platform="cpu",
)
def copy_kv_cache_blocks_inplace(
    original: Callable[..., None],
    kv_caches: Iterable[torch.Tensor],
    num_blocks: int,
    kv_cache_block_copies: list[KVCacheBlockCopy],
) -> None:
    caches = list({cache.data_ptr(): cache for cache in kv_caches}.values())
    if caches and all(len(cache) == num_blocks and cache[0].is_contiguous() for cache in caches):
        choose_kernels().copy_blocks(caches, block_pairs(kv_cache_block_copies))
    else:
        original(caches, num_blocks, kv_cache_block_copies)
