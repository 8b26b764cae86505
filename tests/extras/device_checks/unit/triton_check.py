"""Compares the Triton kernel with float64 attention; run as a program with TRITON_INTERPRET=1.

A program of its own, because the variable must be set before Triton is imported and would change
what later tests import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from support import gpu_attention

from tests.unit.attention.paged_cases import PagedCase, RequestShape, attention_kind, paged_case
from tests.unit.attention.shuffled_programs import shuffle_programs
from vllm_trie.attention import split_cache
from vllm_trie.attention.gpu_launch import TreeBuffers
from vllm_trie.attention.triton_kernel import tree_attention_triton
from vllm_trie.extras.device_checks import kernel_check
from vllm_trie.extras.device_checks.kernel_check import LayerShape

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NODES = [RequestShape(70, 1, 20)]
CASES = [  # requests, dtype, heads, KV heads, head size, block size, processors, head first
    (NODES, torch.float32, 1, 1, 32, 16, 1, True),
    ([*NODES, RequestShape(0, 1, 0)], torch.float32, 7, 1, 80, 32, 64, False),
    ([RequestShape(63, 1, 12), RequestShape(0, 31, 0)], torch.bfloat16, 4, 2, 64, 16, 1, False),
    ([RequestShape(700, 1, 9), RequestShape(128, 1, 0)], torch.float16, 4, 1, 128, 16, 9, True),
    ([RequestShape(10, 1, 130), RequestShape(17, 2, 1)], torch.float32, 2, 1, 32, 32, 2, True),
    ([RequestShape(40, 1, 70)], torch.bfloat16, 2, 2, 112, 16, 2, True),
    ([RequestShape(30, 20, 10)], torch.float32, 2, 1, 64, 48, 1, True),
    ([RequestShape(5, 3, 65)], torch.float16, 3, 1, 256, 16, 1, False),
    ([RequestShape(2100, 1, 40)], torch.bfloat16, 2, 1, 64, 128, 40, False),
    ([RequestShape(n % 7, 1, n) for n in range(0, 65, 8)], torch.float16, 1, 1, 64, 16, 1, True),
]
STOCK_CASES = (0, 2, 9)
"""Run by Triton's own interpreter too, which takes its time."""
KINDS = [  # of attention, and a case
    ({"window": 1}, (NODES, torch.float32, 1, 1, 32, 16, 1, True)),
    (
        {"window": 7, "sinks": True},
        ([RequestShape(300, 5, 40)], torch.float32, 4, 2, 32, 16, 4, True),
    ),
    ({"window": 500}, ([RequestShape(900, 1, 9), *NODES], torch.float16, 4, 1, 64, 16, 9, True)),
    ({"window": 20}, ([RequestShape(0, 70, 0), *NODES], torch.float32, 2, 1, 32, 32, 1, False)),
    ({"chunk": 16}, ([RequestShape(60, 1, 70)], torch.float32, 2, 1, 32, 16, 2, True)),
    ({"soft_cap": 2.0}, (NODES, torch.float32, 2, 1, 64, 16, 1, False)),
    (
        {"soft_cap": 5.0, "sinks": True},
        ([RequestShape(1500, 1, 5)], torch.bfloat16, 2, 1, 64, 16, 40, True),
    ),
    (
        {"window": 300, "chunk": 256, "soft_cap": 3.0, "sinks": True},
        ([RequestShape(505, 3, 130), RequestShape(2, 1, 0)], torch.float32, 3, 1, 80, 16, 6, True),
    ),
]

DEVICE_CHECKS = [  # what a GPU is asked before it serves: shape, splits
    (LayerShape(4, 2, 64, 16, torch.float32), (2,)),
    (LayerShape(2, 1, 128, 16, torch.bfloat16), (8,)),
    (LayerShape(3, 3, 32, 32, torch.float16, torch.float8_e5m2), (1,)),
    (LayerShape(4, 1, 64, 16, torch.bfloat16, torch.float8_e4m3fn), (3,)),
    (LayerShape(4, 2, 64, 16, torch.float32, None, 10, 0, 5.0, True), (2,)),
    (LayerShape(5, 1, 64, 16, torch.float32, chunk=20), (2,)),
]
DEVICE_BATCHES = (
    (kernel_check.RequestShape(3, 1, 12), kernel_check.RequestShape(0, 1, 1)),
    (kernel_check.RequestShape(290, 1, 6), kernel_check.RequestShape(40, 1, 0)),
)


def gpu_cache(case: PagedCase, head_first: bool) -> torch.Tensor:
    """The case's cache as GPUs have it: a slot's key and value side by side."""
    keys, values = split_cache(case.kv_cache)
    cache = torch.cat([keys.transpose(2, 3), values], dim=-1)
    if head_first:
        return cache.contiguous()
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


class Graph:
    """A launch as a CUDA graph captures it: all tensors and sizes are those of the first step.

    Later steps have as many tokens and requests or fewer, in the same memory.
    """

    def __init__(self, case: PagedCase, num_processors: int, head_first: bool = True) -> None:
        rows, head_size = case.trees.rows, case.query.shape[2]
        self.query = case.query
        self.output = torch.full(case.query.shape, 7.0, dtype=case.query.dtype)
        self.cache = gpu_cache(case, head_first)
        self.table = case.block_table
        self.starts = torch.zeros(len(rows) + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(len(rows), dtype=torch.int32)
        self.buffers = TreeBuffers(
            *(len(rows), 4096, head_size, num_processors, torch.device("cpu")),
            with_offsets=case.kind.is_partial,
        )
        self.kind = case.kind
        self.buffers.partial.fill_(torch.nan)
        self.buffers.state.fill_(torch.nan)
        self.scale = case.scale
        self.max_queries = max(row.num_queries for row in rows)
        self.describe(case)

    def describe(self, case: PagedCase) -> None:
        """Write the lengths and trees of a step; requests that it lacks have no tokens."""
        rows = case.trees.rows
        ends = [row.query_start + row.num_queries for row in rows]
        self.starts[1:] = ends[-1]
        self.starts[1 : len(ends) + 1] = torch.tensor(ends)
        self.seq_lens.zero_()
        self.seq_lens[: len(rows)] = torch.tensor([row.seq_len for row in rows])
        self.buffers.write(case.trees)

    def load(self, case: PagedCase) -> None:
        """Write a whole step into the captured tensors."""
        self.describe(case)
        self.query[: len(case.query)] = case.query
        cache = gpu_cache(case, True)
        self.cache[: len(cache)] = cache
        self.table.zero_()
        self.table[: len(case.block_table), : case.block_table.shape[1]] = case.block_table
        self.output.fill_(7.0)

    def launch(self) -> None:
        arguments = (self.query, self.cache, self.table, self.starts, self.seq_lens, self.buffers)
        sizes = (self.scale, self.output, self.max_queries)
        tree_attention_triton(*arguments, *sizes, kind=self.kind)


def error_of(graph: Graph, case: PagedCase) -> float:
    """Largest error of a launch, relative to the largest value; infinite for padding's output."""
    graph.launch()
    output = graph.output.double().numpy()
    if not (output[len(case.query) :] == 7.0).all():
        return float("inf")
    error = np.abs(output[: len(case.query)] - case.expected).max()
    return float(error / max(1.0, case.largest_value))


def replays() -> Iterator[tuple[str, float]]:
    """Replay one captured launch: other trees, fewer requests, none with a tree, and the first."""
    shape = (torch.float32, 4, 2, 64, 16)
    steps = (
        [RequestShape(300, 1, 12), RequestShape(20, 1, 12), RequestShape(9, 1, 12)],
        [RequestShape(40, 1, 5), RequestShape(530, 1, 12), RequestShape(1, 1, 0)],
        [RequestShape(77, 2, 11)],
        [RequestShape(310, 1, 0), RequestShape(32, 1, 0), RequestShape(15, 1, 0)],
        [RequestShape(0, 24, 0)],
        [RequestShape(300, 1, 12), RequestShape(20, 1, 12), RequestShape(9, 1, 12)],
    )
    first = paged_case([RequestShape(600, 1, 12)] * 3, *shape, seed=99)
    graph = Graph(first, num_processors=12)
    for number, requests in enumerate(steps):
        case = paged_case(requests, *shape, seed=number)
        graph.load(case)
        yield f"replay {requests}", error_of(graph, case)


def shared() -> Iterator[tuple[str, float]]:
    """Count the programs that share slots in a graph for up to 24 tokens and requests.

    It has 24 programs at once for each of 2 KV heads, and each takes 16 queries and 256 slots or
    more.
    """
    shape = (torch.float32, 4, 2, 64, 16)
    one, long = RequestShape(1060, 1, 0), RequestShape(1040, 1, 12)
    graph = Graph(paged_case([one] * 24, *shape, seed=98), num_processors=24)
    graph.max_queries = 13
    for requests, expected in (
        ([RequestShape(1040, 1, 20)], 2 * 5),  # two blocks, each of five times 256 slots
        ([long, RequestShape(1040, 1, 10)], 2 * 5),
        ([long, *[one] * 5], 6 * 4),
        ([one] * 13, 0),
    ):
        case = paged_case(requests, *shape, seed=97)
        graph.load(case)
        graph.buffers.state.fill_(torch.nan)
        error = error_of(graph, case)
        num_programs = int((~graph.buffers.state[:, 0].isnan()).sum()) // (2 * 32)
        yield f"{num_programs} programs for {requests}", error + abs(num_programs - expected)


def benchmarked() -> Iterator[tuple[str, float]]:
    """Run the kernels of ``benchmarks/attention.py --device cuda``."""
    shape = LayerShape(4, 2, 32, 16, torch.float32)
    step = gpu_attention.one_request(shape, context=40, nodes=12)
    for kernel, run in gpu_attention.runs(step, torch.device("cpu")).items():
        yield f"benchmarked {kernel}", kernel_check.relative_error(run(), step.expected(), step)


@triton.jit
def _load_or_other(place, other, output, is_there):
    # What is done depends on whether the other value is true.
    tl.store(output, tl.load(place, mask=is_there > 0, other=tl.load(other)))


def small_outputs() -> list[torch.Tensor]:
    """Run small cases without splits, whose sums have one order."""
    outputs = [torch.zeros(1) for _ in range(4)]
    for number, output in enumerate(outputs):
        other = torch.full((1,), float(number % 2))
        _load_or_other[(1,)](torch.full((1,), 7.0), other, output, number // 2)
    for seed, index in enumerate(STOCK_CASES):
        requests, dtype, *shape, processors, head_first = CASES[index]
        kind = attention_kind(shape[0], window=7, soft_cap=2.0, sinks=True)
        graph = Graph(
            paged_case(requests, dtype, *shape, seed=seed, kind=kind), processors, head_first
        )
        graph.launch()
        outputs.append(graph.output)
    return outputs


def main() -> int:
    of_stock_interpreter = small_outputs()
    shuffle_programs()
    bad = 0
    for how in ("recorded", "replayed"):
        same = [*map(torch.equal, of_stock_interpreter, small_outputs())]
        bad += not all(same)
        print("ok " if all(same) else "BAD", how, same, flush=True)
    cases = [*(({}, case) for case in CASES), *KINDS]
    for seed, (options, (requests, dtype, *shape, processors, head_first)) in enumerate(cases):
        kind = attention_kind(shape[0], **options)
        case = paged_case(requests, dtype, *shape, seed=seed, kind=kind)
        error = error_of(Graph(case, processors, head_first), case)
        good = error <= TOLERANCE[dtype]
        bad += not good
        mark = "ok " if good else "BAD"
        print(mark, options, requests, dtype, shape, processors, error, flush=True)
    for name, error in (*replays(), *shared(), *benchmarked()):
        bad += not error <= 1e-6
        print("ok " if error <= 1e-6 else "BAD", name, error, flush=True)
    for layer, splits in DEVICE_CHECKS:
        check = kernel_check.check_kernel(layer, torch.device("cpu"), DEVICE_BATCHES, splits)
        bad += not check.passed
        print("ok " if check.passed else "BAD", layer, splits, check.largest_error, flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
