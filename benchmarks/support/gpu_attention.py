"""Tree attention on a GPU, one layer: vLLM's kernel for a chain, this project's, torch's."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from support.harness import Row
from vllm_trie.attention.kernel_check import LayerShape, RequestShape, Step, fill_cache, random_step

BLOCK_SIZE = 16


def gpu_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of every dtype, context and number of nodes."""
    rows = []
    for name, context, nodes in itertools.product(options.dtypes, options.contexts, options.nodes):
        dtype: torch.dtype = getattr(torch, name)
        heads = options.num_heads, options.num_kv_heads
        shape = LayerShape(*heads, options.head_size, BLOCK_SIZE, dtype)
        ms = {kernel: milliseconds(run) for kernel, run in runs(shape, context, nodes).items()}
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


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the median time of a run on the device."""
    from triton.testing import do_bench

    run()  # compiles
    return float(do_bench(run, warmup=20, rep=100, return_mode="median"))


def runs(shape: LayerShape, context: int, nodes: int) -> dict[str, Callable[[], Any]]:
    """Return a run of each kernel on the same step of one request."""
    device = torch.device("cuda", 0)
    num_blocks = -(-(context + nodes + 1) // BLOCK_SIZE)
    request = RequestShape(context, 1, nodes)
    step = random_step(shape, [request], num_blocks, np.random.default_rng(nodes))
    assert step is not None
    size = (num_blocks, BLOCK_SIZE, shape.num_kv_heads, 2 * shape.head_size)
    cache = torch.empty(size, dtype=shape.dtype, device=device).transpose(1, 2)
    fill_cache(cache, step)
    on_device = step.query.to(device), cache, torch.from_numpy(step.block_table).to(device)
    found = {"triton": tree_run(step, *on_device), "torch": masked_run(step, on_device[0])}
    if shape.dtype != torch.float32:  # FlashAttention has 16-bit kernels only
        found["stock"] = chain_run(step, *on_device)
    return found


def tree_run(step: Step, query: Any, cache: Any, table: Any) -> Callable[[], None]:
    """Return a run of this project's kernel."""
    from vllm_trie.attention.triton_kernel import tree_attention_triton, trees_on_device
    from vllm_trie.vllm_hooks.worker.attention.cuda import num_splits

    num_kv_heads = cache.shape[1]
    trees = trees_on_device(step.trees, query.shape[1] // num_kv_heads, query.device)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    splits = num_splits(len(trees.blocks) * num_kv_heads, int(step.seq_lens[0]), processors)
    output = torch.empty_like(query)
    return lambda: tree_attention_triton(query, cache, table, trees, step.scale, output, splits)


def chain_run(step: Step, query: Any, cache: Any, table: Any) -> Callable[[], Any]:
    """Return a run of vLLM's FlashAttention with as many tokens as a chain."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    head_size = query.shape[2]
    keys, values = cache.transpose(1, 2).split(head_size, dim=-1)
    arguments = {
        "max_seqlen_q": len(query),
        "cu_seqlens_q": torch.tensor([0, len(query)], dtype=torch.int32, device=query.device),
        "max_seqlen_k": int(step.seq_lens[0]),
        "seqused_k": torch.from_numpy(step.seq_lens).to(query.device),
        "softmax_scale": step.scale,
        "causal": True,
        "block_table": table,
        "fa_version": get_flash_attn_version(head_size=head_size),
    }
    return lambda: flash_attn_varlen_func(query, keys, values, **arguments)


def masked_run(step: Step, query: Any) -> Callable[[], Any]:
    """Return a run of torch's attention with a mask, over keys and values that lie in order."""
    (mask,) = step.trees.masks
    heads, keys, values = (
        part.to(query.device).transpose(0, 1)[None] for part in (query, step.keys, step.values)
    )
    arguments = {"attn_mask": mask.to(query.device), "scale": step.scale, "enable_gqa": True}
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(heads, keys, values, **arguments)
