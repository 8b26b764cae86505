"""Tree attention over a paged cache in torch operations: the oracle of the kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from vllm_trie.attention import TreeBatch, TreeRow, build_tree_batch, split_cache


def tree_attention_in_torch(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Compute `vllm_trie.attention.tree_attention` for any head and block size.

    Gathers each request's blocks and runs torch's scaled dot-product attention with a mask.
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
            positions = torch.from_numpy(_key_positions(trees, index)).to(dtype)
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


def _key_positions(trees: TreeBatch, index: int) -> np.ndarray:
    """Return int64 [seq_len], the place in its text of each token that `rows[index]` may see.

    The first level of the tree is at 0, committed tokens are before it.
    """
    row, words = trees.rows[index], trees.ancestor_words[index]
    positions = np.arange(row.seq_len, dtype=np.int64) - (row.seq_len - row.num_nodes)
    if row.num_nodes:
        bits = np.unpackbits(words.view(np.uint8).reshape(row.num_nodes, -1), axis=1)
        positions[-row.num_nodes :] = bits.sum(axis=1, dtype=np.int64) - 1
    return positions
