"""Tree attention over vLLM's paged CPU cache in plain torch operations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_trie.attention.cpu_cache import split_cache
from vllm_trie.attention.tree_batch import TreeBatch


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Attention of all query rows that belong to trees; other rows of ``output`` stay as they are.

    Gathers each request's blocks and runs torch's scaled dot-product attention with a mask. Simple
    and exact in every dtype; its cost grows with the gathered context.

    Args:
        query: [num_tokens, num_heads, head_size].
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], see
            :mod:`vllm_trie.attention.cpu_cache`; holds the keys and values of this step already.
        block_table: int32 [num_requests, max_blocks].
        trees: what each row sees.
        scale: factor on the scores.
        output: [num_tokens, num_heads, head_size], written.
    """
    block_size = kv_cache.shape[2]
    keys, values = split_cache(kv_cache)
    num_kv_heads, head_size = keys.shape[1], keys.shape[2]
    grouped = query.shape[1] != num_kv_heads
    for row, mask in zip(trees.rows, trees.masks(), strict=True):
        num_blocks = -(-row.seq_len // block_size)
        blocks = block_table[row.batch_index, :num_blocks].long()
        # [blocks, heads, head_size, block] -> [heads, slots, head_size]
        key = keys[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_size)
        value = values[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_size)
        rows = slice(row.query_start, row.query_start + row.num_queries)
        attended = F.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            key[None, :, : row.seq_len],
            value[None, :, : row.seq_len],
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )
        output[rows] = attended[0].transpose(0, 1)
