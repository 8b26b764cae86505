"""Tree attention over a paged cache in torch operations: the oracle of the kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from vllm_trie.attention import (
    FULL_ATTENTION,
    AttentionKind,
    TreeBatch,
    TreeRow,
    build_tree_batch,
    split_cache,
)
from vllm_trie.attention.tree_batch import slot_mask


def tree_attention_in_torch(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
    kind: AttentionKind = FULL_ATTENTION,
) -> None:
    """Compute `vllm_trie.attention.tree_attention` for any head and block size.

    Gathers each request's blocks and multiplies all of it, in the precision of the arguments.
    """
    block_size = kv_cache.shape[2]
    keys, values = split_cache(kv_cache)
    trees = _each_alone(trees)
    num_kv_heads, head_size = keys.shape[1], keys.shape[2]
    for index, (row, words) in enumerate(zip(trees.rows, trees.ancestor_words, strict=True)):
        mask = torch.from_numpy(slot_mask(words, row.num_queries, row.seq_len))
        num_blocks = -(-row.seq_len // block_size)
        blocks = block_table[row.batch_index, :num_blocks].long()
        # [blocks, heads, head_size, block] -> [heads, slots, head_size]
        key = keys[blocks].permute(1, 0, 3, 2).reshape(num_kv_heads, -1, head_size)
        value = values[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_size)
        rows = slice(row.query_start, row.query_start + row.num_queries)
        group = query.shape[1] // num_kv_heads
        key, value = (
            part[:, : row.seq_len].repeat_interleave(group, dim=0) for part in (key, value)
        )
        scores = query[rows].transpose(0, 1) @ key.transpose(1, 2) * scale
        if kind.soft_cap:
            scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
        positions = torch.from_numpy(_key_positions(trees, index))
        of_queries = positions[row.seq_len - row.num_queries :, None]
        if kind.alibi_slopes is not None:
            scores += kind.alibi_slopes.to(scores)[:, None, None] * (positions - of_queries)
        if kind.window:
            mask = mask & (positions > of_queries - kind.window)
        if kind.chunk:
            mask = mask & (positions // kind.chunk == of_queries // kind.chunk)
        scores.masked_fill_(~mask, -torch.inf)
        if kind.sinks is not None:
            sinks = kind.sinks.to(scores)[:, None, None].expand(-1, row.num_queries, 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = scores.softmax(-1)[..., : row.seq_len]
        # Nothing that lies in slots which a row does not see may reach it.
        value = value.nan_to_num(0.0) if kind.is_partial else value
        output[rows] = (weights @ value).transpose(0, 1)


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
    """Return int64 [seq_len], the place in its text of each token that `rows[index]` may see."""
    row, words = trees.rows[index], trees.ancestor_words[index]
    positions = np.arange(row.seq_len, dtype=np.int64)
    if row.num_nodes:
        bits = np.unpackbits(words.view(np.uint8).reshape(row.num_nodes, -1), axis=1)
        positions[-row.num_nodes :] = (
            row.seq_len - row.num_nodes - 1 + bits.sum(axis=1, dtype=np.int64)
        )
    return positions
