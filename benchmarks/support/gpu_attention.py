"""Tree attention on a GPU, one layer, in the kernels of vLLM (a chain), this project and others.

xFormers' `tree_attention` attends to the committed text and to the tree in two passes and merges
them: an independent implementation, of keys and values that lie in order instead of in pages.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from support.harness import Row
from vllm_trie.attention.tree_batch import slot_mask
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
    if reason := why_no_xformers():
        print(f"no rows of xformers: {reason}")
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
    """Return a run of each kernel that the device, the dtype and the environment have."""
    num_kv_heads, head_size = step.keys.shape[1:]
    size = (step.block_table.size, BLOCK_SIZE, num_kv_heads, 2 * head_size)
    cache = torch.empty(size, dtype=step.keys.dtype, device=device).transpose(1, 2)
    fill_cache(cache, step)
    on_device = step.query.to(device), cache, torch.from_numpy(step.block_table).to(device)
    functions = {"triton": tree_run(step, *on_device), "torch": masked_run(step, device)}
    if device.type == "cuda" and step.keys.dtype != torch.float32:
        functions["stock"] = chain_run(step, *on_device)
    if why_no_xformers() is None:
        functions["xformers"] = xformers_run(step, device)
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


def _mask(step: Step) -> torch.Tensor:
    """Return bool [num_queries, seq_len], the KV slots that each query token sees."""
    (row,), (words,) = step.trees.rows, step.trees.ancestor_words
    return torch.from_numpy(slot_mask(words, row.num_queries, row.seq_len))


def masked_run(step: Step, device: torch.device) -> Run:
    """Return a run of torch's attention with a mask, over keys and values that lie in order."""
    mask = _mask(step)
    heads, keys, values = (
        part.to(device).transpose(0, 1)[None] for part in (step.query, step.keys, step.values)
    )
    arguments = {"attn_mask": mask.to(device), "scale": step.scale, "enable_gqa": True}
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(heads, keys, values, **arguments)[0].transpose(0, 1)


def why_no_xformers() -> str | None:
    """Return why xFormers' kernel cannot run here; None if it can."""
    import triton.language as tl

    if importlib.util.find_spec("xformers") is None:
        return "xformers is not installed"
    if not hasattr(tl, "advance"):
        return "its kernels need Triton's block pointers, which this Triton has removed"
    return None


def xformers_run(step: Step, device: torch.device) -> Run:
    """Return a run of xFormers' tree attention, over keys and values that lie in order."""
    from xformers.ops.fmha import triton_splitk
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention

    num_queries, num_heads, head_size = step.query.shape
    num_kv_heads, context = step.keys.shape[1], len(step.keys) - num_queries
    group = num_heads // num_kv_heads
    query = step.query.to(device).view(1, num_queries, num_kv_heads, group, head_size)
    keys, values = (
        part.to(device)[None, :, :, None].expand(-1, -1, -1, group, -1)
        for part in (step.keys, step.values)
    )
    mask = _mask(step)
    seen = mask[:, context:].to(device)  # the token before the tree, and the tree
    bias = torch.zeros(seen.shape, dtype=query.dtype, device=device).masked_fill_(~seen, -torch.inf)
    prefix = BlockDiagonalPaddedKeysMask.from_seqlens([num_queries], context, [context])
    parts = keys[:, context:], values[:, context:], keys[:, :context], values[:, :context]
    return lambda: tree_attention(query, *parts, bias, prefix, prefix_op=triton_splitk.FwOp)[
        0
    ].flatten(1, 2)
