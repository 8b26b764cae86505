"""Tree attention on the CPU, and moves of KV slots."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from vllm_trie.attention.cache_layout import move_slots
from vllm_trie.attention.kind import FULL_ATTENTION, AttentionKind
from vllm_trie.attention.native import NativeKernels
from vllm_trie.attention.tree_batch import TreeBatch

logger = logging.getLogger(f"vllm.{__name__}")


@functools.cache
def choose_kernels() -> NativeKernels:
    """Return the kernels of this process, loaded at the first call, with one log line."""
    native = NativeKernels()
    threads = "OpenMP" if native.has_openmp else "one thread, as no OpenMP runtime is loaded"
    logger.info("tree attention on the CPU: %s, %s", native.instructions, threads)
    return native


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
    kind: AttentionKind = FULL_ATTENTION,
    isa: str = "vec",
) -> None:
    """Compute the attention of query rows that belong to trees; other rows of ``output`` stay.

    Args:
        query: [num_tokens, num_heads, head_size], float32, bfloat16 or float16.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size] of the same dtype, see
            :mod:`vllm_trie.attention.cache_layout`; holds this step's keys and values. Slots that
            no row sees may hold anything, NaN included.
        block_table: int32 [num_requests, max_blocks]. Blocks that no row of a request sees are not
            read.
        trees: The slots that each row sees.
        scale: Positive factor on the scores.
        output: [num_tokens, num_heads, head_size], written.
        kind: Of the layer.
        isa: vLLM's kernel, which lays out the cache.

    Raises:
        ValueError: The shapes, strides or dtypes are none of vLLM's CPU backend.
    """
    arguments = (query, kv_cache, block_table, trees, scale, output, kind, isa)
    if not choose_kernels().tree_attention(*arguments):
        raise ValueError(
            f"tree attention got a query of {query.dtype} {list(query.shape)} and a cache of "
            f"{kv_cache.dtype} {list(kv_cache.shape)} for {isa!r}; it takes float32, bfloat16 and "
            "float16, the same in both, with heads and blocks of a multiple of 16, or for 'amx' "
            "bfloat16 and a multiple of 32"
        )


def move_slots_in_layers(
    kv_caches: Sequence[torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
    isa: str = "vec",
) -> None:
    """Do :func:`vllm_trie.attention.move_slots` in every layer's CPU cache."""
    if not choose_kernels().move_slots(kv_caches, source, target, isa):
        for kv_cache in kv_caches:
            move_slots(kv_cache, source, target, isa)
