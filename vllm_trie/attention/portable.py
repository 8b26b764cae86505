"""Tree attention over vLLM's paged CPU cache in plain torch operations, for machines without a
compiler; the readable twin of the native kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_trie.attention.cpu_cache import split_cache
from vllm_trie.attention.tree_batch import TreeBatch


def tree_attention_portable(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """What :func:`vllm_trie.attention.tree_attention` promises, with the same arguments.

    Gathers each request's blocks and runs torch's scaled dot-product attention with a mask. Simple
    and exact in every dtype, for any head and block size; its cost grows with the gathered
    context. Unused slots may hold anything: they are not gathered.
    """
    block_size = kv_cache.shape[2]
    keys, values = split_cache(kv_cache)
    num_kv_heads, head_size = keys.shape[1], keys.shape[2]
    grouped = query.shape[1] != num_kv_heads
    for index, (row, mask) in enumerate(zip(trees.rows, trees.masks, strict=True)):
        num_blocks = -(-row.seq_len // block_size)
        blocks = block_table[row.batch_index, :num_blocks].long()
        # [blocks, heads, head_size, block] -> [heads, slots, head_size]
        key = keys[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_size)
        value = values[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_size)
        rows = slice(row.query_start, row.query_start + row.num_queries)
        own = query[rows]
        if alibi_slopes is not None:
            # In 16 bits the bias of a far token would be rounded to the next one's.
            dtype = torch.promote_types(query.dtype, torch.float32)
            own, key, value = own.to(dtype), key.to(dtype), value.to(dtype)
            positions = torch.from_numpy(trees.key_positions(index)).to(dtype)
            mask = torch.where(mask, alibi_slopes.to(dtype)[:, None, None] * positions, -torch.inf)
        attended = F.scaled_dot_product_attention(
            own.transpose(0, 1)[None],
            key[None, :, : row.seq_len],
            value[None, :, : row.seq_len],
            attn_mask=mask,
            scale=scale,
            enable_gqa=grouped,
        )
        output[rows] = attended[0].transpose(0, 1)
