"""Tree attention on a GPU, one layer, in the kernels of vLLM (a chain) and of this project."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from support.harness import Row
from vllm_trie.extras.device_checks.kernel_check import (
    LayerShape,
    RequestShape,
    Step,
    fill_cache,
    random_step,
)

BLOCK_SIZE = 16

Run = Callable[[], torch.Tensor]
"""A launch; returns float [tokens, heads, head size]."""


def gpu_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of every dtype, context and number of nodes."""
    device = torch.device("cuda", 0)
    rows = []
    for name, context, nodes in itertools.product(options.dtypes, options.contexts, options.nodes):
        heads = options.num_heads, options.num_kv_heads
        shape = LayerShape(*heads, options.head_size, BLOCK_SIZE, getattr(torch, name))
        ms = {
            kernel: milliseconds(run)
            for kernel, run in runs(one_request(shape, context, nodes), device).items()
        }
        rows += [
            {
                "kernel": kernel,
                "context": context,
                "nodes": nodes,
                "num_heads": shape.num_heads,
                "num_kv_heads": shape.num_kv_heads,
                "head_size": shape.head_size,
                "dtype": name,
                "ms": taken,
                "ratio_to_stock": taken / ms["stock"] if "stock" in ms else None,
            }
            for kernel, taken in ms.items()
        ]
    return rows


def milliseconds(run: Run) -> float:
    """Return the median time of a run on the device."""
    from triton.testing import do_bench

    run()  # compiles
    return float(do_bench(run, warmup=20, rep=100, return_mode="median"))


def one_request(shape: LayerShape, context: int, nodes: int) -> Step:
    """Return a step of one request with a tree."""
    request = RequestShape(context, 1, nodes)
    num_blocks = -(-request.seq_len // BLOCK_SIZE)
    return random_step(shape, [request], num_blocks, np.random.default_rng(nodes))


def runs(step: Step, device: torch.device) -> dict[str, Run]:
    """Return a run of each kernel that the device and the dtype have."""
    num_kv_heads, head_size = step.keys.shape[1:]
    size = (step.block_table.size, BLOCK_SIZE, num_kv_heads, 2 * head_size)
    cache = torch.empty(size, dtype=step.keys.dtype, device=device).transpose(1, 2)
    fill_cache(cache, step)
    on_device = step.query.to(device), cache, torch.from_numpy(step.block_table).to(device)
    functions = {"triton": tree_run(step, *on_device)}
    if device.type == "cuda" and step.keys.dtype != torch.float32:
        functions["stock"] = chain_run(step, *on_device)
    return functions


def tree_run(
    step: Step, query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor
) -> Run:
    """Return a run of this project's kernel, divided as the engine divides it."""
    from vllm_trie.attention.gpu_launch import TreeBuffers
    from vllm_trie.attention.triton_kernel import tree_attention_triton

    device, output = query.device, torch.empty_like(query)
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    words = step.trees.word_array.size
    buffers = TreeBuffers(1, words, query.shape[2], processors, device)
    buffers.write(step.trees)
    lengths = torch.from_numpy(step.starts).to(device), torch.from_numpy(step.seq_lens).to(device)
    batch = (block_table, *lengths, buffers)

    def run() -> torch.Tensor:
        tree_attention_triton(query, cache, *batch, step.scale, output, max_queries=len(query))
        return output

    return run


def chain_run(
    step: Step, query: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor
) -> Run:
    """Return a run of vLLM's FlashAttention with as many tokens as a chain."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    head_size = query.shape[2]
    keys, values = cache.transpose(1, 2).split(head_size, dim=-1)
    arguments: dict[str, Any] = {
        "max_seqlen_q": len(query),
        "cu_seqlens_q": torch.tensor([0, len(query)], dtype=torch.int32, device=query.device),
        "max_seqlen_k": int(step.seq_lens[0]),
        "seqused_k": torch.from_numpy(step.seq_lens).to(query.device),
        "softmax_scale": step.scale,
        "causal": True,
        "block_table": block_table,
        "fa_version": get_flash_attn_version(head_size=head_size),
    }
    return lambda: flash_attn_varlen_func(query, keys, values, **arguments)
