"""Compares the Triton kernel with float64 attention; run as a program with TRITON_INTERPRET=1.

A program of its own, because the variable must be set before Triton is imported and would change
what later tests import.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from tests.unit.attention.paged_cases import PagedCase, RequestShape, paged_case
from vllm_trie.attention import kernel_check, split_cache
from vllm_trie.attention.triton_kernel import tree_attention_triton, trees_on_device

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CASES = [  # requests, dtype, heads, KV heads, head size, block size, splits, head first
    ([RequestShape(70, 1, 20)], torch.float32, 1, 1, 32, 16, 1, True),
    ([RequestShape(70, 1, 20)], torch.float32, 7, 1, 80, 32, 4, False),
    ([RequestShape(63, 1, 12), RequestShape(0, 1, 31)], torch.bfloat16, 4, 2, 64, 16, 1, False),
    ([RequestShape(128, 1, 9)], torch.float16, 4, 1, 128, 16, 3, True),
    ([RequestShape(10, 1, 130), RequestShape(17, 2, 1)], torch.float32, 2, 1, 32, 32, 2, True),
    ([RequestShape(40, 1, 70)], torch.bfloat16, 2, 2, 112, 16, 2, True),
    ([RequestShape(30, 20, 10)], torch.float32, 2, 1, 64, 48, 1, True),
    ([RequestShape(5, 3, 65)], torch.float32, 3, 1, 256, 16, 1, False),
]

DEVICE_CHECKS = [  # what a GPU is asked before it serves: shape, splits
    (kernel_check.LayerShape(4, 2, 64, 16, torch.float32), (1, 2)),
    (kernel_check.LayerShape(2, 1, 128, 16, torch.bfloat16), (1, 16)),
    (kernel_check.LayerShape(3, 3, 32, 32, torch.float16), (4,)),
]
DEVICE_BATCHES = (
    (kernel_check.RequestShape(3, 1, 12), kernel_check.RequestShape(0, 1, 1)),
    (kernel_check.RequestShape(90, 1, 6), kernel_check.RequestShape(40, 1, 0)),
)


def gpu_cache(case: PagedCase, head_first: bool) -> torch.Tensor:
    """The case's cache as GPUs have it: a slot's key and value side by side."""
    keys, values = split_cache(case.kv_cache)
    cache = torch.cat([keys.transpose(2, 3), values], dim=-1)
    if head_first:
        return cache.contiguous()
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def error_of(case: PagedCase, num_splits: int, head_first: bool) -> float:
    """Largest error, relative to the largest value."""
    num_kv_heads = case.kv_cache.shape[1]
    trees = trees_on_device(case.trees, case.query.shape[1] // num_kv_heads, torch.device("cpu"))
    output = torch.full(case.query.shape, 7.0, dtype=case.query.dtype)
    cache = gpu_cache(case, head_first)
    tree_attention_triton(
        case.query, cache, case.block_table, trees, case.scale, output, num_splits
    )
    error = np.abs(output.double().numpy() - case.expected()).max()
    return float(error / max(1.0, case.largest_value))


def main() -> int:
    bad = 0
    for seed, (requests, dtype, *shape, num_splits, head_first) in enumerate(CASES):
        case = paged_case(requests, dtype, *shape, seed=seed)
        error = error_of(case, num_splits, head_first)
        good = error <= TOLERANCE[dtype]
        bad += not good
        print("ok " if good else "BAD", requests, dtype, shape, num_splits, error)
    for layer, splits in DEVICE_CHECKS:
        check = kernel_check.check_kernel(layer, torch.device("cpu"), DEVICE_BATCHES, splits)
        bad += not check.passed
        print("ok " if check.passed else "BAD", layer, splits, check.largest_error)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
