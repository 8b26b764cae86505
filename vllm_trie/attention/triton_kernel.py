"""Tree attention over vLLM's paged GPU cache, in Triton.

One program takes some queries of one request, with all query heads of one KV head, and a share of
the request's slots. It passes over the slots in tiles with one online softmax: first those that
every query sees, then the step's own, where ancestor words decide. Where a step has too few queries
to fill the device, several programs share the slots and a second kernel joins their results (flash
decoding).

Importing this module imports Triton. With ``TRITON_INTERPRET=1`` the kernels run on CPU tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from vllm_trie.attention.device_copy import to_device
from vllm_trie.attention.tree_batch import TreeBatch

NUM_SPLITS = (1, 2, 4, 8, 16)
"""Numbers of programs that can share a request's slots; each is compiled on its own."""
_MIN_ROWS = 16
"""Rows of Triton's smallest matrix product."""
_LOG2_E = 1.4426950408889634


class DeviceTrees(NamedTuple):
    """A batch of trees as the kernel reads it; the same for all layers of a step."""

    rows: torch.Tensor
    """int32 [num_rows, 6]: the fields of ``TreeRow``, then the index of the row's first word."""
    words: torch.Tensor
    """int32, ancestor words split in halves, low half first."""
    blocks: torch.Tensor
    """int32 [num_query_blocks, 2]: index into ``rows``, first query."""
    queries_per_block: int


def trees_on_device(trees: TreeBatch, group: int, device: torch.device) -> DeviceTrees:
    """Copy a batch of trees to the cache's device; `group` is the number of query heads per KV
    head."""
    queries_per_block = max(1, 64 // triton.next_power_of_2(group))
    rows, words = trees.row_array, trees.word_array
    num_words = rows[:, 3] * -(-rows[:, 3] // 64) * 2
    starts = np.cumsum(num_words) - num_words
    blocks = [
        (index, first)
        for index, row in enumerate(trees.rows)
        for first in range(0, row.num_queries, queries_per_block)
    ]
    return DeviceTrees(
        to_device(np.column_stack([rows, starts]).astype(np.int32), device),
        to_device(np.append(words, np.uint64(0)).astype("<u8").view(np.int32), device),
        to_device(np.array(blocks, dtype=np.int32).reshape(-1, 2), device),
        queries_per_block,
    )


def tree_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: DeviceTrees,
    scale: float,
    output: torch.Tensor,
    num_splits: int = 1,
) -> None:
    """Compute the attention of query rows that belong to trees; other rows of ``output`` stay.

    Args:
        query: [num_tokens, num_heads, head_size]; heads are contiguous.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], laid out as
            :mod:`vllm_trie.attention.cache_layout` says for GPUs; holds this step's keys and
            values. Slots that no row sees may hold anything.
        block_table: int32 [num_requests, max_blocks].
        trees: see :func:`trees_on_device`.
        scale: positive factor on the scores.
        output: [num_tokens, num_heads, head_size], written.
        num_splits: programs that share a request's slots, one of :data:`NUM_SPLITS`.

    Raises:
        ValueError: the cache has another layout, or another dtype than the queries.

    Scores and sums are float32. Weights are rounded to the cache's dtype for the product with the
    values, as vLLM's Triton kernel does.
    """
    _, num_heads, head_size = query.shape
    _check_cache(kv_cache, head_size, query.dtype)
    _, num_kv_heads, block_size, _ = kv_cache.shape
    num_blocks = len(trees.blocks)
    if not num_blocks:
        return
    padded_group = triton.next_power_of_2(num_heads // num_kv_heads)
    num_rows = num_blocks * trees.queries_per_block
    partial, state = _partial_results(output, num_splits, num_rows)
    padded_head = max(16, triton.next_power_of_2(head_size))
    sizes = {"HEAD_SIZE": head_size, "PADDED_HEAD": padded_head, "SPLITS": num_splits}
    _attend[(num_blocks, num_kv_heads, num_splits)](
        *(query, kv_cache, block_table, trees.rows, trees.words, trees.blocks),
        *(output, partial, state, scale * _LOG2_E, num_rows, num_heads),
        *(query.stride(0), output.stride(0), *kv_cache.stride()[:3], block_table.stride(0)),
        GROUP=num_heads // num_kv_heads,
        PADDED_GROUP=padded_group,
        BLOCK_SIZE=block_size,
        QUERIES=trees.queries_per_block,
        ROWS=max(_MIN_ROWS, trees.queries_per_block * padded_group),
        TILE=_tile(padded_head, kv_cache.element_size()),
        # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
        WIDEN=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        **sizes,
    )
    if num_splits > 1:
        _join[(num_rows, num_heads)](
            *(trees.rows, trees.blocks, partial, state, output),
            *(num_rows, num_heads, output.stride(0)),
            QUERIES=trees.queries_per_block,
            **sizes,
        )


def _partial_results(
    output: torch.Tensor, num_splits: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for each program's weighted values, and for its maxima and sums; any tensor
    where one program has all slots."""
    if num_splits == 1:
        return output, output
    num_heads, head_size = output.shape[1:]
    # Only rows of trees: a prefill in the same batch has thousands of others.
    shape = (num_splits, num_rows, num_heads)
    partial = torch.empty(*shape, head_size, dtype=torch.float32, device=output.device)
    return partial, torch.empty(*shape, 2, dtype=torch.float32, device=output.device)


def _check_cache(kv_cache: torch.Tensor, head_size: int, dtype: torch.dtype) -> None:
    if kv_cache.shape[3] != 2 * head_size or kv_cache.stride(3) != 1 or kv_cache.dtype != dtype:
        raise ValueError(
            f"the KV cache is {kv_cache.dtype} {tuple(kv_cache.shape)} with strides "
            f"{kv_cache.stride()}; tree attention reads {dtype} [num_blocks, num_kv_heads, "
            f"block_size, {2 * head_size}] whose last dimension is contiguous"
        )


def _tile(padded_head: int, element_size: int) -> int:
    """Return the slots of one pass. Keys and values of several passes are in shared memory at a
    time, of which a device has 64 KiB to 227 KiB."""
    return min(64, max(16, 16384 // (padded_head * element_size)))


# Specializing sizes that change from step to step would compile kernels while the engine serves.
@triton.jit(do_not_specialize=["num_rows", "table_stride"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query_ptr,
    cache_ptr,
    block_table_ptr,
    rows_ptr,
    words_ptr,
    blocks_ptr,
    output_ptr,
    partial_ptr,
    state_ptr,
    scale,
    num_rows,
    num_heads,
    query_stride,
    output_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    tree = rows_ptr + tl.load(blocks_ptr + 2 * block) * 6
    first_query = tl.load(blocks_ptr + 2 * block + 1)
    batch_index = tl.load(tree).to(tl.int64)
    query_start = tl.load(tree + 1)
    num_queries = tl.load(tree + 2)
    num_nodes = tl.load(tree + 3)
    seq_len = tl.load(tree + 4)
    tree_words = words_ptr + tl.load(tree + 5)

    # One row of the products per query and head of the group.
    row = tl.arange(0, ROWS)
    query = first_query + row // PADDED_GROUP
    head = kv_head * GROUP + row % PADDED_GROUP
    used = (row // PADDED_GROUP < QUERIES) & (query < num_queries) & (row % PADDED_GROUP < GROUP)
    token = (query_start + query).to(tl.int64)
    node = query - (num_queries - num_nodes)
    # Committed tokens are causal; nodes see all committed tokens, and others by their words.
    dense = tl.where(node < 0, seq_len - num_nodes + node + 1, seq_len - num_nodes)
    words_per_node = (num_nodes + 63) // 64 * 2
    node_words = tree_words + tl.maximum(node, 0) * words_per_node

    d = tl.arange(0, PADDED_HEAD)
    in_head = d < HEAD_SIZE
    q = tl.load(
        query_ptr + token[:, None] * query_stride + (head * HEAD_SIZE)[:, None] + d[None, :],
        mask=used[:, None] & in_head[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, PADDED_HEAD], tl.float32)

    num_tiles = (seq_len + TILE - 1) // TILE
    first_tile = num_tiles * split // SPLITS
    last_tile = num_tiles * (split + 1) // SPLITS
    for tile in range(first_tile, last_tile):
        slot = tile * TILE + tl.arange(0, TILE)
        in_use = slot < seq_len
        physical = tl.load(
            block_table_ptr + batch_index * table_stride + slot // BLOCK_SIZE, mask=in_use, other=0
        ).to(tl.int64)
        base = (
            physical * cache_block_stride
            + kv_head * cache_head_stride
            + (slot % BLOCK_SIZE) * cache_slot_stride
        )
        present = in_use[:, None] & in_head[None, :]
        address = cache_ptr + base[:, None] + d[None, :]
        k = tl.load(address, mask=present, other=0.0)
        v = tl.load(address + HEAD_SIZE, mask=present, other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        # Scores, not a mask, leave the branch: Triton's compiler fails on tensors of booleans that
        # change their layout for devices before Ampere.
        masked = tl.where(slot[None, :] < dense[:, None], scores, float("-inf"))
        if (tile + 1) * TILE > seq_len - num_queries:
            bit = slot[None, :] - (seq_len - num_nodes)
            is_node = (bit >= 0) & in_use[None, :] & (node >= 0)[:, None] & used[:, None]
            word = tl.load(node_words[:, None] + bit // 32, mask=is_node, other=0)
            masked = tl.where(is_node & (((word >> (bit & 31)) & 1) != 0), scores, masked)
        scores = masked
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        # A row may see nothing of a tile: its maximum must not be subtracted from itself then.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        factor = tl.exp2(maximum - shift)
        total = total * factor + tl.sum(weights, axis=1)
        weighted = weighted * factor[:, None] + tl.dot(
            weights.to(v.dtype), v, input_precision="ieee"
        )
        maximum = new_maximum

    wanted = used[:, None] & in_head[None, :]
    if SPLITS == 1:
        tl.store(
            output_ptr + token[:, None] * output_stride + (head * HEAD_SIZE)[:, None] + d[None, :],
            (weighted / total[:, None]).to(output_ptr.dtype.element_ty),
            mask=wanted,
        )
    else:
        own = block * QUERIES + row // PADDED_GROUP
        place = (split * num_rows + own).to(tl.int64) * num_heads + head
        tl.store(partial_ptr + place[:, None] * HEAD_SIZE + d[None, :], weighted, mask=wanted)
        tl.store(state_ptr + place * 2, maximum, mask=used)
        tl.store(state_ptr + place * 2 + 1, total, mask=used)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    rows_ptr,
    blocks_ptr,
    partial_ptr,
    state_ptr,
    output_ptr,
    num_rows,
    num_heads,
    output_stride,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
):
    own = tl.program_id(0)
    block = own // QUERIES
    head = tl.program_id(1)
    tree = rows_ptr + tl.load(blocks_ptr + 2 * block) * 6
    query = tl.load(blocks_ptr + 2 * block + 1) + own % QUERIES
    if query < tl.load(tree + 2):
        token = (tl.load(tree + 1) + query).to(tl.int64)
        d = tl.arange(0, PADDED_HEAD)
        in_head = d < HEAD_SIZE
        maximum = float("-inf")
        for split in range(SPLITS):
            place = (split * num_rows + own).to(tl.int64) * num_heads + head
            maximum = tl.maximum(maximum, tl.load(state_ptr + place * 2))
        total = 0.0
        weighted = tl.zeros([PADDED_HEAD], tl.float32)
        for split in range(SPLITS):
            place = (split * num_rows + own).to(tl.int64) * num_heads + head
            factor = tl.exp2(tl.load(state_ptr + place * 2) - maximum)
            total += factor * tl.load(state_ptr + place * 2 + 1)
            some = tl.load(partial_ptr + place * HEAD_SIZE + d, mask=in_head, other=0.0)
            weighted += factor * some
        tl.store(
            output_ptr + token * output_stride + head * HEAD_SIZE + d,
            (weighted / total).to(output_ptr.dtype.element_ty),
            mask=in_head,
        )
