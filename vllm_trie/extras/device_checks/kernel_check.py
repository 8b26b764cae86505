"""Check of the GPU kernel's results on a device, before it serves requests.

The inputs make mistakes large. Each query looks for one slot: its key there is the query itself,
stretched, so that the right answer is nearly that slot's value. Half of the heads look for a slot
that they may see; the other half for one that they may not, such as a node of another branch. Its
value would replace everything else if the mask let it through.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.attention import FULL_ATTENTION, AttentionKind
from vllm_trie.attention.tree_batch import TreeBatch, TreeRow, build_tree_batch, slot_mask
from vllm_trie.tree import TokenTree

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error of tree attention, relative to the largest value in the cache."""
_UNUSED = 500.0
"""The content of unused slots: finite, and far from all right values."""
_UNUSED_BYTE = 0x7B
"""The same for float8: the bits of 352 in e4m3, and of 57344 in e5m2."""
_NO_WORDS = np.empty((0, 1), dtype=np.uint64)


class LayerShape(NamedTuple):
    """The properties of a layer that its kernel is compiled for."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    quantized: torch.dtype | None = None
    """Type of the cache's values, if it is not `dtype`."""
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False

    def kind(self, sinks: torch.Tensor | None = None) -> AttentionKind:
        """Return the layer's attention, with these sinks or some that matter."""
        if self.has_sinks and sinks is None:
            sinks = torch.linspace(-2.0, 6.0, self.num_heads)
        return AttentionKind(self.window, self.chunk, self.soft_cap, sinks)

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.quantized or self.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.quantized:
            dtype += f" with a KV cache of {str(self.quantized).removeprefix('torch.')}"
        dtype += f", window {self.window}" if self.window else ""
        dtype += f", chunks of {self.chunk}" if self.chunk else ""
        dtype += f", soft cap {self.soft_cap}" if self.soft_cap else ""
        dtype += ", sinks" if self.has_sinks else ""
        return (
            f"{self.num_heads} heads, {self.num_kv_heads} KV heads of size {self.head_size}, "
            f"block size {self.block_size}, {dtype}"
        )

    @property
    def min_capability(self) -> tuple[int, int]:
        """The lowest compute capability that multiplies these dtypes."""
        if self.quantized:
            return (8, 9)
        return (8, 0) if self.dtype == torch.bfloat16 else (7, 5)


class RequestShape(NamedTuple):
    """One request of a step."""

    computed: int
    """Tokens of earlier steps."""
    committed: int
    """Causal tokens of this step."""
    num_nodes: int
    """Nodes of its tree; 0 for a request without one."""

    @property
    def seq_len(self) -> int:
        return self.computed + self.committed + self.num_nodes


BATCHES: tuple[tuple[RequestShape, ...], ...] = (
    (RequestShape(0, 1, 1),),
    (RequestShape(3, 1, 12), RequestShape(40, 1, 31), RequestShape(15, 1, 64)),
    (RequestShape(17, 1, 65), RequestShape(9, 2, 130)),
    (RequestShape(600, 1, 32), RequestShape(1, 1, 8)),
    (RequestShape(30, 20, 10), RequestShape(63, 1, 0), RequestShape(70, 1, 20)),
    (RequestShape(0, 33, 0), RequestShape(5, 3, 40), RequestShape(90, 1, 0), RequestShape(2, 1, 5)),
)
"""Checked steps: short and long contexts, trees of more than a word, requests without a tree."""


@dataclass(frozen=True)
class Step:
    """One step over a paged cache, on the CPU.

    Attributes:
        query: [num_tokens, num_heads, head_size].
        keys, values: [sum of the lengths, num_kv_heads, head_size], request by request.
        slots: int64 [sum of the lengths], their slots: block * block_size + offset.
        block_table: int32 [num_requests, max_blocks].
        starts: int32 [num_requests + 1], first query row of each request.
        seq_lens: int32 [num_requests].
        trees: Of the requests that have one.
        tree_rows: bool [num_tokens], query rows that belong to them.
        scale: Of the scores.
        kind: Of the attention.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: np.ndarray
    block_table: np.ndarray
    starts: np.ndarray
    seq_lens: np.ndarray
    trees: TreeBatch
    tree_rows: np.ndarray
    scale: float
    kind: AttentionKind = FULL_ATTENTION

    def step_slots(self) -> np.ndarray:
        """Return int64 [num_tokens], the slots of the step's own tokens."""
        ends = np.cumsum(self.seq_lens)
        counts = np.diff(self.starts)
        return np.concatenate(
            [self.slots[end - count : end] for end, count in zip(ends, counts, strict=True)]
        )

    def expected(self) -> torch.Tensor:
        """Return the exact attention, float64 [num_tokens, num_heads, head_size]."""
        group = self.query.shape[1] // self.keys.shape[1]
        indices = [row.batch_index for row in self.trees.rows]
        words = dict(zip(indices, self.trees.ancestor_words, strict=True))
        output = torch.empty(self.query.shape, dtype=torch.float64)
        end = 0
        for index, seq_len in enumerate(self.seq_lens):
            rows = slice(int(self.starts[index]), int(self.starts[index + 1]))
            slots = slice(end, end + int(seq_len))
            end = slots.stop
            num_queries = rows.stop - rows.start
            mask = slot_mask(words.get(index, _NO_WORDS), num_queries, int(seq_len), self.kind)
            key = self.keys[slots].double().repeat_interleave(group, dim=1)
            value = self.values[slots].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,shd->hqs", self.query[rows].double(), key) * self.scale
            if cap := self.kind.soft_cap:
                scores = cap * torch.tanh(scores / cap)
            scores.masked_fill_(~torch.from_numpy(mask), -torch.inf)
            if self.kind.sinks is not None:
                sinks = self.kind.sinks.cpu().double()[:, None, None].expand(-1, num_queries, 1)
                scores = torch.cat([scores, sinks], dim=2)
            weights = scores.softmax(-1)[..., : int(seq_len)]
            output[rows] = torch.einsum("hqs,shd->qhd", weights, value)
        return output


def num_blocks_of(requests: Sequence[RequestShape], shape: LayerShape) -> int:
    """Return the KV blocks of some requests."""
    return sum(-(-request.seq_len // shape.block_size) for request in requests)


def random_step(
    shape: LayerShape,
    requests: Sequence[RequestShape],
    num_blocks: int,
    generator: np.random.Generator,
    sinks: torch.Tensor | None = None,
    scale: float = 0.0,
) -> Step:
    """Return a step with these requests, in batch order, which a cache of `num_blocks` can hold.

    Args:
        sinks: Of the layer, some that matter if left out.
        scale: The same; by the head size if left out.
    """
    kind, scale = shape.kind(sinks), scale or shape.head_size**-0.5
    blocks_of = [-(-request.seq_len // shape.block_size) for request in requests]
    free = generator.permutation(num_blocks).astype(np.int32)
    block_table = np.zeros((len(requests), max(blocks_of)), dtype=np.int32)
    rows, words, slots, masks = [], [], [], []
    starts = np.zeros(len(requests) + 1, dtype=np.int32)
    for index, request in enumerate(requests):
        mine, free = free[: blocks_of[index]], free[blocks_of[index] :]
        block_table[index, : len(mine)] = mine
        position = np.arange(request.seq_len)
        blocks = mine[position // shape.block_size].astype(np.int64)
        slots.append(blocks * shape.block_size + position % shape.block_size)
        num_queries = request.committed + request.num_nodes
        starts[index + 1] = starts[index] + num_queries
        tree_words = _NO_WORDS
        if request.num_nodes:
            tree_words = random_tree(generator, request.num_nodes).ancestor_words()
            start = int(starts[index])
            rows.append(TreeRow(index, start, num_queries, request.num_nodes, request.seq_len))
            words.append(tree_words)
        masks.append(slot_mask(tree_words, num_queries, request.seq_len, kind))
    query, keys, values = _random_tensors(shape, masks, scale, generator)
    tree_rows = np.zeros(len(query), dtype=bool)
    for row in rows:
        tree_rows[row.query_start : row.query_start + row.num_queries] = True
    return Step(
        query,
        keys,
        values,
        np.concatenate(slots),
        block_table,
        starts,
        np.array([request.seq_len for request in requests], dtype=np.int32),
        build_tree_batch(rows, words, len(query)),
        tree_rows,
        scale,
        kind,
    )


def _random_tensors(
    shape: LayerShape, masks: Sequence[np.ndarray], scale: float, generator: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of requests with these masks."""

    def normal() -> torch.Tensor:
        size = (sum(mask.shape[1] for mask in masks), shape.num_kv_heads, shape.head_size)
        drawn = generator.standard_normal(size, dtype=np.float32)
        return torch.from_numpy(drawn).to(shape.cache_dtype).to(shape.dtype)

    keys = normal()
    sought = _sought_slots(masks, shape.num_heads, generator)
    stretch = 10.0 / (shape.head_size * scale)
    kv_head = np.arange(shape.num_heads) // (shape.num_heads // shape.num_kv_heads)
    query = (stretch * keys[sought, kv_head].float()).to(shape.dtype)
    return query, keys, normal()


def random_tree(generator: np.random.Generator, num_nodes: int) -> TokenTree:
    """Return a tree whose shape ranges from a chain to a star; its tokens do not matter."""
    reach = int(generator.integers(1, num_nodes + 1))
    parents = [max(-1, node - int(generator.integers(1, reach + 1))) for node in range(num_nodes)]
    return TokenTree.from_lists(list(range(num_nodes)), parents)


def _sought_slots(
    masks: Sequence[np.ndarray], num_heads: int, generator: np.random.Generator
) -> np.ndarray:
    """Return int64 [num_tokens, num_heads], the slot that each query and head looks for."""
    sought, first = [], 0
    for mask in masks:
        for row in mask:
            seen, unseen = np.flatnonzero(row), np.flatnonzero(~row)
            of_row = generator.choice(seen, num_heads)
            if len(unseen):
                of_row[1::2] = generator.choice(unseen, num_heads // 2)
                if num_heads == 1 and generator.random() < 0.5:
                    of_row[:] = generator.choice(unseen)
            sought.append(first + of_row)
        first += mask.shape[1]
    return np.array(sought)


def fill_cache(kv_cache: torch.Tensor, step: Step) -> None:
    """Write the keys and values of a step that was drawn for this cache into its slots, and wrong
    values into all others; `kv_cache` is [num_blocks, num_kv_heads, block_size, 2 * head_size]."""
    block_size = kv_cache.shape[2]
    slots = torch.from_numpy(step.slots).to(kv_cache.device)
    written = torch.cat([step.keys, step.values], dim=-1).to(kv_cache.dtype).to(kv_cache.device)
    unused = _UNUSED
    if kv_cache.itemsize == 1:  # torch has few operations on float8
        kv_cache, written = kv_cache.view(torch.uint8), written.view(torch.uint8)
        unused = _UNUSED_BYTE
    kv_cache.fill_(unused)
    kv_cache[slots // block_size, :, slots % block_size] = written


def relative_error(output: torch.Tensor, expected: torch.Tensor, step: Step) -> float:
    """Return the largest error, relative to the largest value in the cache; infinite for NaN."""
    error = (output.double().cpu() - expected).abs().max().item() if output.numel() else 0.0
    return float("inf") if error != error else error / step.values.abs().max().item()


class KernelCheck(NamedTuple):
    """The result of :func:`check_kernel`."""

    num_steps: int
    largest_error: float
    """Relative to the largest value in the cache."""
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.largest_error <= self.tolerance


def check_kernel(
    shape: LayerShape,
    device: torch.device,
    batches: Sequence[Sequence[RequestShape]] = BATCHES,
    splits: Sequence[int] = (),
) -> KernelCheck:
    """Run the kernel on random steps, one for each of the batches, in a cache of its own.

    Each step runs with every number of rows that a program can have.

    Args:
        splits: Numbers of programs that share a request's slots, checked one after another;
            ``NUM_SPLITS`` of the kernel if empty.

    Raises:
        Exception: Whatever the kernel's compiler or the device raises.
    """
    from vllm_trie.attention import gpu_launch, triton_kernel

    generator = np.random.default_rng(0)
    largest, num_steps = 0.0, 0
    for requests in batches:
        num_blocks = num_blocks_of(requests, shape) + 2
        step = random_step(shape, requests, num_blocks, generator)
        expected = step.expected()
        size = (num_blocks, shape.block_size, shape.num_kv_heads, 2 * shape.head_size)
        kv_cache = torch.empty(size, dtype=shape.cache_dtype, device=device).transpose(1, 2)
        fill_cache(kv_cache, step)
        for launch, num_splits in itertools.product(
            gpu_launch.launches(shape.head_size, shape.dtype),
            splits or triton_kernel.NUM_SPLITS,
        ):
            output = run_kernel(step, kv_cache, launch.rows, num_splits)
            largest = max(largest, relative_error(output, expected, step))
            num_steps += 1
    return KernelCheck(num_steps, largest, TOLERANCE[shape.dtype])


def run_kernel(step: Step, kv_cache: torch.Tensor, num_rows: int, num_splits: int) -> torch.Tensor:
    """Return what the GPU kernel gives for a step.

    Args:
        step: See :func:`random_step`.
        kv_cache: Filled by :func:`fill_cache`.
        num_rows: Queries times heads of a KV head that a program takes at a time.
        num_splits: Programs that share a request's slots.
    """
    from vllm_trie.attention import gpu_launch, triton_kernel

    device = kv_cache.device
    num_tokens, num_heads, head_size = step.query.shape
    num_requests, num_kv_heads = len(step.seq_lens), step.keys.shape[1]
    group = gpu_launch.padded_group(num_heads, num_kv_heads)
    # Rows of all programs, as if each were one of a multiprocessor.
    programs = num_splits * num_kv_heads * (num_tokens * group // 64 + num_requests)
    buffers = gpu_launch.TreeBuffers(
        *(num_requests, step.trees.word_array.size, head_size, programs, device),
        with_offsets=step.kind.is_partial,
    )
    buffers.write(step.trees)
    query = step.query.to(device)
    sinks = None if step.kind.sinks is None else step.kind.sinks.to(device)
    output = torch.full_like(query, _UNUSED)
    scale, kv_scales = step.scale, None
    if kv_cache.dtype != query.dtype:  # factors that cancel out
        kv_scales = (torch.full((1,), 0.5, device=device), torch.full((1,), 4.0, device=device))
        scale *= 2.0
    triton_kernel.tree_attention_triton(
        query,
        kv_cache,
        torch.from_numpy(step.block_table).to(device),
        torch.from_numpy(step.starts).to(device),
        torch.from_numpy(step.seq_lens).to(device),
        buffers,
        scale,
        output,
        max(1, num_rows // group),
        kv_scales=kv_scales,
        kind=step.kind._replace(sinks=sinks),
        num_splits=num_splits,
    )
    return output if kv_scales is None else output * 0.25
