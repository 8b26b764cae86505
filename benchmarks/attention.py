"""Tree attention against vLLM's own kernel on a chain of as many tokens: one layer, one step.

Rows of `stock` are vLLM's CPU kernel with causal attention for 1 + nodes tokens, those of `native`
this project's C++ kernel with a random tree. With vLLM's choice `amx`, `native vec` is that kernel
with the cache layout of CPUs without AMX. Every run passes over the caches of several layers in
turn, as a model does, so no layer's keys and values are in the nearest cache. `ms` is the median of
interleaved repeats, per layer.

`compaction` moves 8 accepted tokens in 32 layers (`ms` is for all of them). Its `stock` row reads
them and writes them again with vLLM's cache update. It is measured twice: one move after another,
with the lines near, and (`from memory`) after a pass over more memory than any cache holds. The
second is where a forward pass leaves the lines: it reads all weights after it touched the first
layer's slots. `--kernels` can leave it out.

With `--device cuda`, `stock` is vLLM's FlashAttention over the paged cache, and `triton` this
project's kernel with the division that the engine chooses. `ms` is the median that Triton's
benchmark measures on the device, launches included.

    python benchmarks/attention.py --json attention.json
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from support.device import check_device
from support.harness import Row, interleave, median_seconds, option_parser, report

from vllm_trie.attention import (
    AttentionKind,
    TreeBatch,
    TreeRow,
    build_tree_batch,
    choose_kernels,
    move_slots_in_layers,
    split_cache,
)
from vllm_trie.tree import TokenTree

KERNELS = ("native", "compaction")
COLUMNS = (
    "kernel", "context", "nodes", "num_heads", "num_kv_heads", "head_size", "dtype", "threads",
    "ms", "ratio_to_stock",
)  # fmt: skip
BLOCK_SIZE = 128
MOVED_TOKENS = 8
MOVED_LAYERS = 32
FLUSHED_BYTES = 256 << 20
"""More than any cache holds."""


def parse() -> argparse.Namespace:
    smoke = {"contexts": [64], "nodes": [4], "layers": 1, "num_heads": 4, "num_kv_heads": 2}
    parser = option_parser(__doc__, repeats=15, smoke={**smoke, "dtypes": ["float32"]})
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the Triton kernel"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="on CPUs, with stock"
    )
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4, help="caches that a run passes over")
    parser.add_argument("--window", type=int, default=0, help="on CPUs; 0 is full attention")
    parser.add_argument("--soft-cap", type=float, default=0.0, help="on CPUs; 0 is none")
    parser.add_argument("--isa", help="vLLM's CPU kernel and its cache: vec, vec16 or amx")
    parser.add_argument("--threads", type=int, help="threads of torch and the kernels")
    return parser.parse_args()


def random_caches(options: argparse.Namespace, dtype: torch.dtype, slots: int, layers: int) -> Any:
    num_blocks = -(-slots // BLOCK_SIZE)
    shape = (num_blocks, options.num_kv_heads, BLOCK_SIZE, 2 * options.head_size)
    return [torch.randn(shape).to(dtype) for _ in range(layers)]


def stock_run(
    options: argparse.Namespace, query: Any, caches: Any, table: Any, seq_len: int, scale: float
) -> Callable[[], None]:
    """Return a run of vLLM's kernel on the same tokens as a chain."""
    from vllm import _custom_ops as ops

    starts = torch.tensor([0, len(query)], dtype=torch.int32)
    seq_lens = torch.tensor([seq_len], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1,
        num_heads=options.num_heads,
        num_kv_heads=options.num_kv_heads,
        head_dim=options.head_size,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=options.window or -1,
        isa=isa_of(options, query.dtype),
        enable_kv_split=True,
    )
    halves = [halves_of(cache) for cache in caches]
    output = torch.empty_like(query)

    def run() -> None:
        for keys, values in halves:
            ops.cpu_attention_with_kv_cache(
                query=query,
                key_cache=keys,
                value_cache=values,
                output=output,
                query_start_loc=starts,
                seq_lens=seq_lens,
                scale=scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=options.window or -1,
                block_table=table,
                softcap=options.soft_cap,
                scheduler_metadata=plan,
                s_aux=None,
            )

    return run


def halves_of(cache: torch.Tensor) -> Any:
    """Return keys and values as vLLM's operations take them."""
    num_blocks, num_kv_heads, block_size, double_head_size = cache.shape
    view = cache.view(num_blocks, num_kv_heads, 2 * block_size, double_head_size // 2)
    return view.chunk(2, dim=2)


def isa_of(options: argparse.Namespace, dtype: torch.dtype) -> str:
    """Return the one given, or vLLM's choice."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    chosen: str = options.isa or _get_attn_isa(dtype, BLOCK_SIZE, options.head_size)
    return chosen


def random_trees(nodes: int, context: int) -> TreeBatch:
    generator = np.random.default_rng(nodes)
    parents = [int(generator.integers(max(-1, node - 6), node)) for node in range(nodes)]
    tree = TokenTree.from_lists(list(range(nodes)), parents)
    row = TreeRow(0, 0, nodes + 1, nodes, context + nodes + 1)
    return build_tree_batch([row], [tree.ancestor_words()], nodes + 1)


def pass_over(kernel: Any, query: Any, caches: Any, tree: Any) -> None:
    """Run a kernel on all caches; `tree` are its further arguments."""
    for cache in caches:
        kernel(query, cache, *tree)


def attention_rows(options: argparse.Namespace, dtype_name: str) -> list[Row]:
    dtype = getattr(torch, dtype_name)
    native = choose_kernels()
    rows = []
    for context, nodes in itertools.product(options.contexts, options.nodes):
        seq_len = context + nodes + 1
        caches = random_caches(options, dtype, seq_len, options.layers)
        num_blocks = len(caches[0])
        table = torch.randperm(num_blocks, dtype=torch.int32)[None].contiguous()
        query = torch.randn(nodes + 1, options.num_heads, options.head_size).to(dtype)
        output = torch.empty_like(query)
        scale = options.head_size**-0.5
        kind = AttentionKind(options.window, soft_cap=options.soft_cap)
        tree = (table, random_trees(nodes, context), scale, output, kind)
        isa = isa_of(options, dtype)
        runs = {"stock": stock_run(options, query, caches, table, seq_len, scale)}
        if "native" in options.kernels:
            attend = partial(pass_over, native.tree_attention, query, caches)
            runs["native"] = partial(attend, (*tree, isa))
            if isa == "amx":
                runs["native vec"] = partial(attend, (*tree, "vec"))
        interleave(runs, 1)
        timed = interleave(runs, options.repeats)
        ms = {
            name: 1e3 * median_seconds(timed_runs) / options.layers
            for name, timed_runs in timed.items()
        }
        rows += [row_of(options, name, context, nodes, dtype_name, ms, ms["stock"]) for name in ms]
    return rows


def compaction_rows(options: argparse.Namespace, dtype_name: str) -> list[Row]:
    """Measure moves of MOVED_TOKENS slots from a tree's end to its beginning, in all layers."""
    from vllm import _custom_ops as ops

    dtype = getattr(torch, dtype_name)
    context, nodes = 1024, 32
    caches = random_caches(options, dtype, context + nodes + 1, MOVED_LAYERS)
    target = torch.arange(context + 1, context + 1 + MOVED_TOKENS)
    source = target + 3 * torch.arange(1, MOVED_TOKENS + 1)

    def write_again() -> None:
        block, offset = source // BLOCK_SIZE, source % BLOCK_SIZE
        for cache in caches:
            keys, values = split_cache(cache)
            ops.cpu_attn_reshape_and_cache(
                keys[block, :, :, offset],
                values[block, :, offset],
                *halves_of(cache),
                target,
                isa_of(options, dtype),
            )

    runs = {
        "compaction": lambda: move_slots_in_layers(caches, source, target, isa_of(options, dtype)),
        "stock compaction": write_again,
    }
    interleave(runs, 1)
    timed = interleave(runs, 3 * options.repeats)
    ms = {name: 1e3 * median_seconds(timed_runs) for name, timed_runs in timed.items()}
    weights = torch.ones(FLUSHED_BYTES // 8, dtype=torch.int64)
    for name, run in runs.items():
        seconds = []
        for _ in range(options.repeats):
            weights.sum()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        ms[f"{name} from memory"] = 1e3 * median(seconds)
    return [
        row_of(options, name, context, nodes, dtype_name, ms, ms.get(f"stock {name}", ms[name]))
        for name in ms
    ]


def row_of(
    options: argparse.Namespace,
    kernel: str,
    context: int,
    nodes: int,
    dtype: str,
    ms: dict[str, float],
    stock_ms: float,
) -> Row:
    return {
        "kernel": kernel,
        "context": context,
        "nodes": nodes,
        "num_heads": options.num_heads,
        "num_kv_heads": options.num_kv_heads,
        "head_size": options.head_size,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "ms": ms[kernel],
        "ratio_to_stock": ms[kernel] / stock_ms,
    }


def run(options: argparse.Namespace) -> list[Row]:
    from vllm.platforms import current_platform

    check_device(options.device)
    current_platform.import_kernels()
    if options.device == "cuda":
        from support.gpu_attention import gpu_rows

        return gpu_rows(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.cpu._init_amx()  # vLLM's kernel has it done by the linear layers before it
    torch.manual_seed(0)
    rows = []
    for dtype in options.dtypes:
        rows += attention_rows(options, dtype)
        if "compaction" in options.kernels:
            rows += compaction_rows(options, dtype)
    return rows


def main() -> None:
    report(run, parse(), COLUMNS)


if __name__ == "__main__":
    main()
