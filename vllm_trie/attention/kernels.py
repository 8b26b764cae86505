"""Tree attention on the CPU: the native kernel, or torch operations for other shapes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from vllm_trie.attention.cache_layout import move_slots, split_cache
from vllm_trie.attention.native import NativeKernels
from vllm_trie.attention.tree_batch import TreeBatch, TreeRow, build_tree_batch

logger = logging.getLogger(__name__)


@functools.cache
def choose_kernels() -> NativeKernels:
    """Return the kernels of this process, loaded at the first call, with one log line."""
    native = NativeKernels()
    threads = "OpenMP" if native.has_openmp else "one thread, as no OpenMP runtime is loaded"
    logger.info("tree attention on the CPU: %s, %s", native.instructions, threads)
    return native


def prefers_chains(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Return whether this kernel should verify chains too, which vLLM's kernel could verify.

    The CPU's kernel is faster for chains in every dtype; the others are slower. `dtype` is that of
    the queries.
    """
    return device.type == "cpu" and dtype == cache_dtype


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Compute the attention of query rows that belong to trees; other rows of ``output`` stay.

    Args:
        query: [num_tokens, num_heads, head_size], float32, bfloat16 or float16.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size] of the same dtype, see
            :mod:`vllm_trie.attention.cache_layout`; holds this step's keys and values. Slots that
            no row sees may hold anything, NaN included.
        block_table: int32 [num_requests, max_blocks].
        trees: The slots that each row sees.
        scale: Positive factor on the scores.
        output: [num_tokens, num_heads, head_size], written.
        alibi_slopes: float32 [num_heads] of a model with linear biases (Press et al., "Train Short,
            Test Long", 2022): the slope times the key's position in the text is added to the scaled
            score. A node's position follows its depth, not its slot.
    """
    arguments = (query, kv_cache, block_table, trees, scale, output, alibi_slopes)
    if not choose_kernels().tree_attention(*arguments):
        tree_attention_portable(*arguments)


def tree_attention_portable(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Compute `tree_attention` in torch operations; the readable twin of the native kernel.

    Gathers each request's blocks and runs torch's scaled dot-product attention with a mask. Exact
    in every dtype, for any head and block size; its cost grows with the gathered context.
    """
    block_size = kv_cache.shape[2]
    keys, values = split_cache(kv_cache)
    trees = _each_alone(trees)
    num_kv_heads, head_size = keys.shape[1], keys.shape[2]
    for index, (row, mask) in enumerate(zip(trees.rows, trees.masks, strict=True)):
        num_blocks = -(-row.seq_len // block_size)
        blocks = block_table[row.batch_index, :num_blocks].long()
        # [blocks, heads, head_size, block] -> [heads, slots, head_size]
        key = keys[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_size)
        value = values[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_size)
        rows = slice(row.query_start, row.query_start + row.num_queries)
        queries = query[rows]
        if alibi_slopes is not None:
            # In 16 bits the bias of a far token would be rounded to the next one's.
            dtype = torch.promote_types(query.dtype, torch.float32)
            queries, key, value = queries.to(dtype), key.to(dtype), value.to(dtype)
            positions = torch.from_numpy(trees.key_positions(index)).to(dtype)
            mask = torch.where(mask, alibi_slopes.to(dtype)[:, None, None] * positions, -torch.inf)
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            key[None, :, : row.seq_len],
            value[None, :, : row.seq_len],
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != num_kv_heads,
        )
        output[rows] = attended[0].transpose(0, 1)


def _each_alone(trees: TreeBatch) -> TreeBatch:
    """Return the rows with one for each request that shares slots with others."""
    if not any(row.num_shared for row in trees.rows):
        return trees
    rows, words = [], []
    for row, own_words in zip(trees.rows, trees.ancestor_words, strict=True):
        for i in range(row.num_queries if row.num_shared else 1):
            one = TreeRow(row.batch_index + i, row.query_start + i, 1, 0, row.seq_len)
            rows.append(one if row.num_shared else row)
            words.append(own_words)
    return replace(build_tree_batch(rows, words, 0), covers_batch=trees.covers_batch)


def move_slots_in_layers(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor
) -> None:
    """Do :func:`vllm_trie.attention.move_slots` in every layer's CPU cache."""
    if not kv_caches or not len(source):
        return
    if not choose_kernels().move_slots(kv_caches, source, target):
        for kv_cache in kv_caches:
            move_slots(kv_cache, source, target)


def copy_slots(caches: Sequence[torch.Tensor], copies: np.ndarray) -> bool:
    """Copy slots of blocks to the same slots of other blocks in every layer's CPU cache, in place.

    Args:
        caches: One tensor per layer, in the layout of :mod:`~vllm_trie.attention.cache_layout`;
            ranges of whole blocks need only its strides.
        copies: int64 [n, 4], source block, target block, first slot and end of the range. No
            target is the source of another copy.

    Returns:
        False, with nothing done, if the caches are none of vLLM's.
    """
    return choose_kernels().copy_slots(caches, copies)
