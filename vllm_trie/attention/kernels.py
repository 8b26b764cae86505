"""Which kernel runs: the native one where it can be built, torch operations elsewhere."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_trie.attention.cpu_cache import move_slots
from vllm_trie.attention.native import NativeKernels, load_kernels
from vllm_trie.attention.portable import tree_attention_portable
from vllm_trie.attention.tree_batch import TreeBatch

logger = logging.getLogger(__name__)


class KernelChoice(NamedTuple):
    """The kernels of this process."""

    native: NativeKernels | None
    """``None``: plain torch operations."""
    reason: str
    """What was chosen and why, for the log."""


@functools.cache
def choose_kernels() -> KernelChoice:
    """Choose once per process, with one log line; compiles the native kernels on first use."""
    native = load_kernels()
    if native is None:
        reason = "torch operations (slower), as the native kernel could not be built or loaded"
    else:
        threads = "OpenMP" if native.has_openmp else "one thread, as no OpenMP runtime is loaded"
        reason = f"native, {native.instructions}, {threads}"
    choice = KernelChoice(native, f"tree attention on the CPU: {reason}")
    logger.info("%s", choice.reason)
    return choice


def prefers_chains(device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Whether drafts that are a chain, which vLLM's kernel could verify as well, belong here.

    The native kernel takes less time for them in every dtype; the others take more.

    Args:
        device: of the model.
        dtype: of the queries.
        cache_dtype: of the KV cache.
    """
    return device.type == "cpu" and dtype == cache_dtype and choose_kernels().native is not None


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    trees: TreeBatch,
    scale: float,
    output: torch.Tensor,
    alibi_slopes: torch.Tensor | None = None,
) -> None:
    """Attention of all query rows that belong to trees; other rows of ``output`` stay as they are.

    Args:
        query: [num_tokens, num_heads, head_size], float32, bfloat16 or float16.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size] of the same dtype, see
            :mod:`vllm_trie.attention.cpu_cache`; holds the keys and values of this step already.
            Slots that no row sees may hold anything, NaN included.
        block_table: int32 [num_requests, max_blocks].
        trees: what each row sees.
        scale: positive factor on the scores.
        output: [num_tokens, num_heads, head_size], written.
        alibi_slopes: float32 [num_heads] of a model with linear biases (Press et al., "Train Short,
            Test Long", 2022): the slope times the key's position in the text is added to the scaled
            score. A node's position follows its depth, not its slot.
    """
    native = choose_kernels().native
    arguments = (query, kv_cache, block_table, trees, scale, output, alibi_slopes)
    if native is None or not native.tree_attention(*arguments):
        tree_attention_portable(*arguments)


def move_slots_in_layers(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy the keys and values of some slots to others in every layer, in place.

    In each layer all sources are read before a target is written, so the two sets may overlap.

    Args:
        kv_caches: one tensor [num_blocks, num_kv_heads, block_size, 2 * head_size] per layer, laid
            out as :mod:`vllm_trie.attention.cpu_cache` says, changed. For GPUs there is
            :func:`vllm_trie.attention.gpu_cache.move_rows_in_layers`.
        source: int64 [n], slot = block * block_size + offset.
        target: int64 [n], distinct slots.
    """
    if not kv_caches or not len(source):
        return
    native = choose_kernels().native
    if native is None or not native.move_slots(kv_caches, source, target):
        for kv_cache in kv_caches:
            move_slots(kv_cache, source, target)
