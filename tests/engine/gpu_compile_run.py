"""Compiles the GPU kernels for several devices; needs none of them.

A program of its own: one failure in Triton's compiler ends the process. Prints one line for each
kernel with the shared memory that it asks for, and is right to end with 1 if that is too much.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_trie.attention import triton_kernel

SHARED_MEMORY_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""By compute capability: what one program may have at most."""
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
CASES = [  # compute capability, dtype, head size, splits
    (75, torch.float16, 128, 1),
    (86, torch.bfloat16, 128, 1),
    (90, torch.bfloat16, 128, 16),
    (120, torch.float16, 128, 1),
]
MORE_CASES = [  # with --all; float32 takes many seconds each
    *((capability, torch.float16, 128, 1) for capability in (80, 89, 90, 100)),
    *((capability, torch.bfloat16, 256, 2) for capability in (80, 86, 90, 100, 120)),
    *((capability, torch.float32, 128, 4) for capability in SHARED_MEMORY_KIB),
]


def compile_kernel(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], capability: int
) -> int:
    """Bytes of shared memory of a kernel; pointers and strides are multiples of 16."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (index,): aligned
        for index, name in enumerate(names)
        if name not in constants
        and (name.endswith("_ptr") or (name.endswith("_stride") and name != "table_stride"))
    }
    source = ASTSource(
        kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).metadata.shared


def compile_case(capability: int, dtype: torch.dtype, head_size: int, splits: int) -> int:
    group = 4
    element = "*" + TYPES[dtype]
    partial = "*fp32" if splits > 1 else element
    types = dict.fromkeys(("block_table_ptr", "rows_ptr", "words_ptr", "blocks_ptr"), "*i32")
    types |= dict.fromkeys(("query_ptr", "cache_ptr", "output_ptr"), element)
    types |= {"partial_ptr": partial, "state_ptr": partial, "scale": "fp32"}
    queries = 64 // group
    common = {"HEAD_SIZE": head_size, "PADDED_HEAD": head_size, "QUERIES": queries}
    constants = {
        **common,
        "GROUP": group,
        "PADDED_GROUP": group,
        "BLOCK_SIZE": 16,
        "ROWS": queries * group,
        "TILE": triton_kernel._tile(head_size, dtype.itemsize),
        "SPLITS": splits,
        "WIDEN": False,
    }
    shared = compile_kernel(triton_kernel._attend, constants, types, capability)
    if splits > 1:
        join = {**common, "SPLITS": splits}
        shared = max(shared, compile_kernel(triton_kernel._join, join, types, capability))
    return shared


def main() -> int:
    too_much = 0
    more = MORE_CASES if "--all" in sys.argv[1:] else []
    for capability, dtype, head_size, splits in [*CASES, *more]:
        shared = compile_case(capability, dtype, head_size, splits)
        allowed = SHARED_MEMORY_KIB[capability] * 1024
        too_much += shared > allowed
        print("COMPILED", capability, dtype, head_size, splits, shared, "of", allowed, flush=True)
    return min(too_much, 1)


if __name__ == "__main__":
    sys.exit(main())
