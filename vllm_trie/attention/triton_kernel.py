"""Attention of every query token of a step over vLLM's paged GPU cache, in Triton.

One program takes some queries of one request, with all query heads of one KV head, and a share of
the request's slots. It passes over the slots in tiles with one online softmax. Committed tokens are
causal, nodes see what their ancestor words say; a request without a tree has no nodes. Where a step
has too few queries to fill the device, several programs share the slots and a second kernel joins
their results (flash decoding).

A CUDA graph can capture a launch: its grid and constants follow from the shapes of the tensors, and
all else is read on the device, the trees from
:class:`~vllm_trie.attention.gpu_launch.TreeBuffers`.

Importing this module imports Triton. With ``TRITON_INTERPRET=1`` the kernels run on CPU tensors.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from vllm_trie.attention.gpu_launch import (
    MIN_ROWS,
    Launch,
    TreeBuffers,
    choose_grid,
    choose_launch,
    padded_group,
    padded_head,
    programs_at_once,
)
from vllm_trie.attention.kind import FULL_ATTENTION, AttentionKind

NUM_SPLITS = (1, 8)
"""Numbers of programs that share a request's slots, as checks try them; any number runs."""
EVERY_LENGTH = 2**31 - 1
"""The value of `longest` that leaves out no request."""
_MIN_SLOTS_PER_SPLIT = 256
_UNLIMITED = 2**30
_LOG2_E = 1.4426950408889634


def tree_attention_triton(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    buffers: TreeBuffers,
    scale: float,
    output: torch.Tensor,
    max_queries: int,
    longest: int = EVERY_LENGTH,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    kind: AttentionKind = FULL_ATTENTION,
    num_splits: int = 0,
) -> None:
    """Compute the attention of a step's query tokens.

    Args:
        query: [num_tokens, num_heads, head_size], the last dimension contiguous; may be padded.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], laid out as
            :mod:`vllm_trie.attention.cache_layout` says for GPUs, of the queries' dtype or
            float8; holds this step's keys and values. Slots that no row sees may hold anything.
        block_table: int32 [num_requests, max_blocks]. Blocks that no row of a request sees are not
            read.
        query_starts: int32 [num_requests + 1], the first query token of each request, and the end.
        seq_lens: int32 [num_requests], KV slots in use, this step's included.
        buffers: Holds the trees and is written to.
        scale: Positive factor on the scores.
        output: [num_tokens, num_heads, head_size], written.
        max_queries: Query tokens of the longest request that is served, or more.
        longest: Requests without a tree and with more query tokens than this are left out.
        kv_scales: float32 [1] each, the factors on float8 keys and values.
        kind: Of the layer, without ALiBi slopes; the sinks may be of any dtype.
        num_splits: Programs that share a request's slots; 0 fills the device.

    Raises:
        ValueError: The cache or the queries have another layout or dtype.

    Scores and sums are float32. Weights are rounded to the queries' dtype for the product with the
    values, as vLLM's Triton kernel does.
    """
    num_tokens, num_heads, head_size = query.shape
    _check_layout(query, kv_cache, output, kv_scales is not None)
    _, num_kv_heads, block_size, _ = kv_cache.shape
    heads_padded = padded_group(num_heads, num_kv_heads)
    launch = choose_launch(max_queries, heads_padded, head_size, query.dtype)
    num_requests = len(seq_lens)
    queries = launch.rows // heads_padded  # of a block
    # vLLM pads a step to the next size of a graph: more than half of the tokens are the step's.
    fewest = num_tokens // 2 if longest == EVERY_LENGTH else 1
    grid = choose_grid(
        (num_tokens + num_requests * (queries - 1)) // queries,
        fewest // queries + 1,
        buffers.num_processors * programs_at_once(launch.rows) // num_kv_heads,
        num_splits,
    )
    k_scale, v_scale = kv_scales or (None, None)
    requests = (query_starts, seq_lens, buffers.trees)
    results = (output, buffers.partial, buffers.state)
    reach = (kind.window or _UNLIMITED, kind.chunk or _UNLIMITED)
    counts = (num_requests, grid.at_once, grid.most_splits, longest, *reach)
    group = num_heads // num_kv_heads
    sizes = constants_of(launch, group, heads_padded, head_size, buffers.max_requests, kind)
    _attend[(grid.num_programs, num_kv_heads)](
        *(query, kv_cache, k_scale, v_scale, kind.sinks, block_table, *requests, *results),
        *(scale * _LOG2_E, *counts, *query.stride()[:2], *output.stride()[:2]),
        *(*kv_cache.stride()[:3], block_table.stride(0)),
        BLOCK_SIZE=block_size,
        PRECISION=_precision(query),
        SOFT_CAP=kind.soft_cap * _LOG2_E,
        # Triton's interpreter multiplies the bits of bfloat16 as if they were integers.
        WIDEN=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        **sizes,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if grid.most_shared:
        _join[(grid.most_shared, num_kv_heads, launch.rows // MIN_ROWS)](
            *(*requests, *results, *counts, *output.stride()[:2]), **sizes
        )


def constants_of(
    launch: Launch,
    group: int,
    padded: int,
    head_size: int,
    max_requests: int,
    kind: AttentionKind = FULL_ATTENTION,
) -> dict[str, int]:
    """Return what both kernels are compiled for; `padded` is the :func:`padded_group`."""
    return {
        "GROUP": group,
        "PADDED_GROUP": padded,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD": padded_head(head_size),
        "ROWS": launch.rows,
        "TILE": launch.tile,
        "MIN_TILES": _MIN_SLOTS_PER_SPLIT // launch.tile,
        "REQUESTS": max(16, triton.next_power_of_2(max_requests)),
        "IS_PARTIAL": kind.is_partial,
    }


def _precision(query: torch.Tensor) -> str:
    """Return how float32 is multiplied: as three products of TF32, which keeps float32's accuracy,
    where there are such products. Those of float32 need more registers than a program has."""
    if query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "ieee"
    return "tf32x3"


def _check_layout(
    query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, is_scaled: bool
) -> None:
    head_size = query.shape[2]
    cache_dtypes = (torch.float8_e4m3fn, torch.float8_e5m2) if is_scaled else (query.dtype,)
    if (
        kv_cache.shape[3] != 2 * head_size
        or kv_cache.stride(3) != 1
        or kv_cache.dtype not in cache_dtypes
    ):
        names = " or ".join(map(str, cache_dtypes))
        raise ValueError(
            f"the KV cache is {kv_cache.dtype} {tuple(kv_cache.shape)} with strides "
            f"{kv_cache.stride()}; tree attention reads {names} [num_blocks, num_kv_heads, "
            f"block_size, {2 * head_size}] whose last dimension is contiguous"
        )
    if query.stride(2) != 1 or output.stride(2) != 1:
        raise ValueError(
            f"the queries have strides {query.stride()} and the output {output.stride()}; their "
            "last dimension must be contiguous"
        )


@triton.jit  # type: ignore[untyped-decorator]
def _block_ends(  # type: ignore[no-untyped-def]
    starts_ptr, trees_ptr, num_requests, longest, QUERIES: tl.constexpr, REQUESTS: tl.constexpr
):
    """Return int32 [REQUESTS], the blocks of queries up to each request's last one."""
    request = tl.arange(0, REQUESTS)
    exists = request < num_requests
    start = tl.load(starts_ptr + request, mask=exists, other=0)
    num_queries = tl.load(starts_ptr + request + 1, mask=exists, other=0) - start
    num_nodes = tl.load(trees_ptr + 3 * request, mask=exists, other=0)
    is_left_out = (num_nodes == 0) & (num_queries > longest)
    return tl.cumsum(tl.where(is_left_out, 0, (num_queries + QUERIES - 1) // QUERIES), 0)


@triton.jit
def _splits_of(block_ends, at_once, most_splits):  # type: ignore[no-untyped-def]
    """Return the number of blocks, and that of programs for each of them."""
    num_blocks = tl.max(block_ends)
    num_splits = tl.minimum(at_once // tl.maximum(num_blocks, 1), most_splits)
    return num_blocks, tl.maximum(num_splits, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _first_seen(position, window, chunk, IS_PARTIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first position that queries at some positions see."""
    first = 0 * position
    if IS_PARTIAL:
        first = tl.maximum(tl.maximum(position - window + 1, 0), position - position % chunk)
    return first


@triton.jit  # type: ignore[untyped-decorator]
def _capped(scores, SOFT_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``SOFT_CAP * tanh(scores / SOFT_CAP)``."""
    power = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / SOFT_CAP))  # e^(-2 |x|)
    size = SOFT_CAP * (1.0 - power) / (1.0 + power)
    return tl.where(scores < 0.0, -size, size)


@triton.jit  # type: ignore[untyped-decorator]
def _share_of(  # type: ignore[no-untyped-def]
    block,
    block_ends,
    num_splits,
    starts_ptr,
    seq_lens_ptr,
    trees_ptr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    window,
    chunk,
    IS_PARTIAL: tl.constexpr,
):
    """Return the request of a block and its first query there, the request's numbers, the first
    slot that any of the block's queries sees, and the programs that share the slots."""
    is_before = block_ends <= block
    request = tl.sum(is_before.to(tl.int32))
    first_query = (block - tl.max(tl.where(is_before, block_ends, 0))) * QUERIES
    start = tl.load(starts_ptr + request)
    num_queries = tl.load(starts_ptr + request + 1) - start
    num_nodes = tl.load(trees_ptr + 3 * request).to(tl.int32)
    seq_len = tl.load(seq_lens_ptr + request)
    # No query's position is lower than that of the first one, or of the first node.
    lowest = seq_len - tl.maximum(num_queries - first_query, num_nodes)
    first_slot = _first_seen(lowest, window, chunk, IS_PARTIAL)
    # The last slot that a query of this program sees.
    end = seq_len - num_queries + tl.minimum(first_query + QUERIES, num_queries)
    num_tiles = (tl.where(num_nodes > 0, seq_len, end) + TILE - 1) // TILE - first_slot // TILE
    parts = tl.minimum((num_tiles + MIN_TILES - 1) // MIN_TILES, num_splits)
    numbers = (start, num_queries, num_nodes, seq_len)
    return request, first_query, numbers, first_slot, num_tiles, parts


# Specializing sizes that change from step to step would compile kernels while the engine serves.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        *("num_requests", "at_once", "most_splits", "longest", "window", "chunk", "table_stride")
    ]
)
def _attend(  # type: ignore[no-untyped-def]
    query_ptr,
    cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    sinks_ptr,
    block_table_ptr,
    starts_ptr,
    seq_lens_ptr,
    trees_ptr,
    output_ptr,
    partial_ptr,
    state_ptr,
    scale,
    num_requests,
    at_once,
    most_splits,
    longest,
    window,
    chunk,
    query_stride,
    query_head_stride,
    output_stride,
    output_head_stride,
    cache_block_stride,
    cache_head_stride,
    cache_slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    REQUESTS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // PADDED_GROUP
    ends = _block_ends(starts_ptr, trees_ptr, num_requests, longest, QUERIES, REQUESTS)
    num_blocks, num_splits = _splits_of(ends, at_once, most_splits)
    block = tl.program_id(0) // num_splits
    split = tl.program_id(0) % num_splits
    if block >= num_blocks:
        return
    request, first_query, numbers, first_slot, num_tiles, parts = _share_of(
        block,
        ends,
        num_splits,
        starts_ptr,
        seq_lens_ptr,
        trees_ptr,
        QUERIES,
        TILE,
        MIN_TILES,
        window,
        chunk,
        IS_PARTIAL,
    )
    start, num_queries, num_nodes, seq_len = numbers
    kv_head = tl.program_id(1)
    if split >= parts:
        return

    # One row of the products per query and head of the group.
    row = tl.arange(0, ROWS)
    query = first_query + row // PADDED_GROUP
    head = kv_head * GROUP + row % PADDED_GROUP
    used = (query < num_queries) & (row % PADDED_GROUP < GROUP)
    token = (start + query).to(tl.int64)
    node = query - (num_queries - num_nodes)
    # Committed tokens are causal; nodes see all committed tokens, and others by their words.
    committed = seq_len - num_nodes
    dense = tl.where(node < 0, committed + node + 1, committed)
    words_per_node = (num_nodes + 63) // 64
    node_words = (
        trees_ptr
        + tl.load(trees_ptr + 3 * request + 1)
        + tl.where(used, tl.maximum(node, 0), 0) * words_per_node
    )
    has_words = used & (node >= 0)
    if IS_PARTIAL:
        offsets_ptr = trees_ptr + tl.load(trees_ptr + 3 * request + 2)
        offset = tl.load(offsets_ptr + node, mask=has_words, other=0).to(tl.int32)
        position = tl.where(node < 0, dense - 1, committed + offset)
        nearest = _first_seen(position, window, chunk, IS_PARTIAL)

    d = tl.arange(0, PADDED_HEAD)
    in_head = d < HEAD_SIZE
    q = tl.load(
        query_ptr + (token * query_stride + head * query_head_stride)[:, None] + d[None, :],
        mask=used[:, None] & in_head[None, :],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head, mask=used, other=0.0).to(tl.float32)
        maximum = tl.where(split == 0, sinks * 1.4426950408889634, maximum)
        total = tl.where(split == 0, 1.0, total)
    weighted = tl.zeros([ROWS, PADDED_HEAD], tl.float32)

    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    head_ptr = cache_ptr + kv_head.to(tl.int64) * cache_head_stride
    place = tl.arange(0, TILE)
    first_tile = first_slot // TILE
    for tile in range(
        first_tile + num_tiles * split // parts, first_tile + num_tiles * (split + 1) // parts
    ):
        slot = tile * TILE + place
        in_use = slot < seq_len
        if IS_PARTIAL:
            in_use = in_use & (slot >= first_slot)  # blocks before it may be gone
        physical = tl.load(table_ptr + slot // BLOCK_SIZE, mask=in_use, other=0).to(tl.int64)
        base = physical * cache_block_stride + (slot % BLOCK_SIZE) * cache_slot_stride
        address = head_ptr + base[:, None] + d[None, :]
        present = in_use[:, None] & in_head[None, :]
        k = tl.load(address, mask=present, other=0.0).to(q.dtype)
        v = tl.load(address + HEAD_SIZE, mask=present, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFT_CAP > 0.0:
            scores = _capped(scores, SOFT_CAP)
        # Scores, not a mask, leave the branch: Triton's compiler fails on tensors of booleans that
        # change their layout for devices before Ampere.
        masked = tl.where(slot[None, :] < dense[:, None], scores, float("-inf"))
        if (tile + 1) * TILE > committed:
            # Bits of the nodes in this tile's slots: from two neighbouring words of each node.
            bit = tile * TILE - committed + 64
            word = bit // 64 - 1 + 0 * row  # the interpreter's masks take no scalar
            low = tl.load(node_words + word, mask=has_words & (word >= 0), other=0).to(tl.uint64)
            high = tl.load(
                node_words + word + 1, mask=has_words & (word + 1 < words_per_node), other=0
            ).to(tl.uint64)
            shift = (bit % 64).to(tl.uint64)
            bits = (low >> shift) | ((high << 1) << (63 - shift))
            seen = ((bits[:, None] >> place[None, :].to(tl.uint64)) & 1) != 0
            masked = tl.where(seen, scores, masked)
        if IS_PARTIAL:
            of_node = slot >= committed
            offsets = tl.load(offsets_ptr + slot - committed, mask=of_node & in_use, other=0)
            places = tl.where(of_node, committed + offsets.to(tl.int32), slot)
            masked = tl.where(places[None, :] >= nearest[:, None], masked, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(masked, axis=1))
        # A row may see nothing of a tile: its maximum must not be subtracted from itself then.
        origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(masked - origin[:, None])
        factor = tl.exp2(maximum - origin)
        total = total * factor + tl.sum(weights, axis=1)
        weighted = tl.dot(
            weights.to(v.dtype), v, weighted * factor[:, None], input_precision=PRECISION
        )
        maximum = new_maximum

    if v_scale_ptr is not None:
        weighted *= tl.load(v_scale_ptr)
    if parts == 1:
        tl.store(
            output_ptr + (token * output_stride + head * output_head_stride)[:, None] + d[None, :],
            (weighted / total[:, None]).to(output_ptr.dtype.element_ty),
            mask=used[:, None] & in_head[None, :],
        )
    else:
        program = tl.program_id(0) * tl.num_programs(1) + kv_head
        partial_row = program * ROWS + row
        tl.store(partial_ptr + (partial_row * PADDED_HEAD)[:, None] + d[None, :], weighted)
        tl.store(state_ptr + partial_row * 2, maximum)
        tl.store(state_ptr + partial_row * 2 + 1, total)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_requests", "at_once", "most_splits", "longest", "window", "chunk"]
)
def _join(  # type: ignore[no-untyped-def]
    starts_ptr,
    seq_lens_ptr,
    trees_ptr,
    output_ptr,
    partial_ptr,
    state_ptr,
    num_requests,
    at_once,
    most_splits,
    longest,
    window,
    chunk,
    output_stride,
    output_head_stride,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    REQUESTS: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // PADDED_GROUP
    ends = _block_ends(starts_ptr, trees_ptr, num_requests, longest, QUERIES, REQUESTS)
    num_blocks, num_splits = _splits_of(ends, at_once, most_splits)
    block = tl.program_id(0)
    if block >= num_blocks:
        return
    _, first_query, numbers, _, _, parts = _share_of(
        block,
        ends,
        num_splits,
        starts_ptr,
        seq_lens_ptr,
        trees_ptr,
        QUERIES,
        TILE,
        MIN_TILES,
        window,
        chunk,
        IS_PARTIAL,
    )
    start, num_queries, _, _ = numbers
    JOINED: tl.constexpr = 16
    kv_head = tl.program_id(1)
    row = tl.program_id(2) * JOINED + tl.arange(0, JOINED)
    query = first_query + row // PADDED_GROUP
    used = (query < num_queries) & (row % PADDED_GROUP < GROUP)
    if parts < 2:  # one program has written the output
        return
    d = tl.arange(0, PADDED_HEAD)
    first = block * num_splits
    maximum = tl.full([JOINED], float("-inf"), tl.float32)
    for split in range(parts):
        partial_row = ((first + split) * tl.num_programs(1) + kv_head) * ROWS + row
        maximum = tl.maximum(maximum, tl.load(state_ptr + partial_row * 2, mask=used, other=0.0))
    total = tl.zeros([JOINED], tl.float32)
    weighted = tl.zeros([JOINED, PADDED_HEAD], tl.float32)
    for split in range(parts):
        partial_row = ((first + split) * tl.num_programs(1) + kv_head) * ROWS + row
        factor = tl.exp2(tl.load(state_ptr + partial_row * 2, mask=used, other=0.0) - maximum)
        total += factor * tl.load(state_ptr + partial_row * 2 + 1, mask=used, other=1.0)
        some = tl.load(
            partial_ptr + (partial_row * PADDED_HEAD)[:, None] + d[None, :],
            mask=used[:, None],
            other=0.0,
        )
        weighted += factor[:, None] * some
    token = (start + query).to(tl.int64)
    head = kv_head * GROUP + row % PADDED_GROUP
    tl.store(
        output_ptr + (token * output_stride + head * output_head_stride)[:, None] + d[None, :],
        (weighted / total[:, None]).to(output_ptr.dtype.element_ty),
        mask=used[:, None] & (d < HEAD_SIZE)[None, :],
    )
