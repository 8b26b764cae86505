"""Compiles the GPU kernels for several devices; needs none of them.

A program of its own: one failure in Triton's compiler ends the process. Prints one row of a table
for each kernel, and ends with 1 if one spills registers, or if a multiprocessor cannot hold as many
programs as the kernel's buffers are made for::

    python -m tests.engine.gpu_compile_run --all

It also compiles kernels as they were launched elsewhere, for the devices by turns::

    python -m tests.engine.gpu_compile_run --launches FILE [--all]
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language
import triton.language.extra.libdevice
import vllm.triton_utils
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

# vLLM has placeholders for Triton on a CPU.
vllm.triton_utils.triton, vllm.triton_utils.tl = triton, triton.language
vllm.triton_utils.tldevice = triton.language.extra.libdevice

from vllm_trie.attention import FULL_ATTENTION, AttentionKind, gpu_launch, triton_kernel
from vllm_trie.drafts.engine.verification import kernels

SHARED_MEMORY_KIB = {75: (64, 64), 80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228)}
SHARED_MEMORY_KIB |= {100: (227, 228), 120: (99, 100)}
"""By compute capability: what one program may have, and what a multiprocessor has."""
REGISTERS = 65536
"""Of a multiprocessor."""
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
DATA_CENTRE = (80, 90, 100)
"""Compute capabilities whose multiprocessors are to hold all programs."""


class Case(NamedTuple):
    capability: int
    dtype: torch.dtype
    head_size: int
    rows: int
    cache_dtype: torch.dtype | None = None
    group: int = 4
    """Query heads of a KV head."""
    block_size: int = 16
    kind: AttentionKind = FULL_ATTENTION


ALL_OF_A_KIND = AttentionKind(window=128, soft_cap=30.0, sinks=torch.empty(1, dtype=torch.float32))
CASES = (
    Case(80, torch.float32, 128, 32),
    Case(90, torch.bfloat16, 128, 64),
    Case(90, torch.bfloat16, 128, 128, torch.float8_e4m3fn),
    Case(100, torch.bfloat16, 256, 32),
    Case(90, torch.bfloat16, 80, 64, group=7, block_size=128),
    Case(90, torch.bfloat16, 128, 128, kind=ALL_OF_A_KIND),
)


class Used(NamedTuple):
    """What a compiled kernel needs."""

    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread; these kernels use it for spilled registers only."""
    shared: int
    """Bytes of a program."""


def all_cases() -> Iterator[Case]:
    for capability in DATA_CENTRE:
        for dtype, sizes in (
            (torch.float32, (64, 128)),
            (torch.bfloat16, (64, 128, 256)),
            (torch.float16, (64, 128, 256)),
        ):
            for size in sizes:
                for launch in gpu_launch.launches(size, dtype):
                    if dtype != torch.float16 or launch.rows >= 64:
                        yield Case(capability, dtype, size, launch.rows)
    for capability in DATA_CENTRE:
        for size in (80, 96, 192):
            for launch in gpu_launch.launches(size, torch.bfloat16):
                yield Case(capability, torch.bfloat16, size, launch.rows)
        for group in (1, 2, 7, 8, 16):
            yield Case(capability, torch.bfloat16, 128, 128, group=group)
        for block_size in (32, 64, 128):
            yield Case(capability, torch.bfloat16, 128, 128, block_size=block_size)
        for size in (64, 128, 256):
            for launch in gpu_launch.launches(size, torch.bfloat16):
                yield Case(capability, torch.bfloat16, size, launch.rows, kind=ALL_OF_A_KIND)
    for capability in (90, 100):
        yield Case(capability, torch.bfloat16, 128, 64, torch.float8_e4m3fn)
        yield Case(capability, torch.bfloat16, 128, 64, torch.float8_e5m2)
    for capability in (75, 86, 89, 120):
        for rows in (16, 64, 128):
            yield Case(capability, torch.float16, 128, rows)


def resources(compiled: Any) -> Used:
    """Read a binary with the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()  # type: ignore[union-attr]
    return Used(int(registers), int(stack), compiled.metadata.shared)


def compile_kernel(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], capability: int, **options: int
) -> Used:
    """Compile for pointers and strides that are multiples of 16."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
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
    places = {(names.index(name),): value for name, value in constants.items()}
    return _compiled(ASTSource(kernel, signature, places, attributes), capability, options)


def _compiled(source: ASTSource, capability: int, options: dict[str, Any]) -> Used:
    target = GPUTarget("cuda", capability, 32)
    return resources(triton.compile(source, target=target, options=options))


def compile_launch(name: str, specialization: str, capability: int) -> Used:
    """Compile for what a launch passes, see :mod:`tests.engine.launches`."""
    module, _, function = name.rpartition(".")
    kernel = getattr(importlib.import_module(module), function)
    while not isinstance(kernel, JITFunction):  # that heuristics choose constants for
        kernel = kernel.fn
    arguments, options = json.loads(specialization, object_hook=_type_of)
    constants, attributes = {}, {}
    for index, (kind, value) in enumerate(arguments.values()):
        if kind == "constexpr":
            constants[(index,)] = value
        elif isinstance(value, str) and value:  # of an annotated type, 1 is no constant
            attributes[(index,)] = CUDABackend.parse_attr(value)
    signature = {argument: kind for argument, (kind, _) in arguments.items()}
    return _compiled(ASTSource(kernel, signature, constants, attributes), capability, options)


def _type_of(value: dict[str, Any]) -> Any:
    return triton.language.dtype(value["tl"]) if value.keys() == {"tl"} else value


def compile_case(case: Case) -> tuple[gpu_launch.Launch, Used, Used]:
    """Return the launch, and what the kernel and its join need."""
    element = "*" + TYPES[case.dtype]
    cache = "*" + TYPES[case.cache_dtype or case.dtype]
    types = dict.fromkeys(("block_table_ptr", "starts_ptr", "seq_lens_ptr"), "*i32")
    types |= {"query_ptr": element, "output_ptr": element, "cache_ptr": cache}
    types |= dict.fromkeys(("partial_ptr", "state_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32")
    types |= {"sinks_ptr": "*fp32", "trees_ptr": "*i64", "scale": "fp32"}
    launch = next(
        one for one in gpu_launch.launches(case.head_size, case.dtype) if one.rows == case.rows
    )
    padded = gpu_launch.padded_group(case.group, 1)
    constants = triton_kernel.constants_of(
        launch, case.group, padded, case.head_size, max_requests=1024, kind=case.kind
    )
    constants |= {
        "BLOCK_SIZE": case.block_size,
        "PRECISION": "tf32x3" if case.capability >= 80 else "ieee",
        "WIDEN": False,
        "SOFT_CAP": case.kind.soft_cap,
    }
    if case.kind.sinks is None:
        constants["sinks_ptr"] = None
    if not case.cache_dtype:
        constants |= {"k_scale_ptr": None, "v_scale_ptr": None}
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    attend = compile_kernel(triton_kernel._attend, constants, types, case.capability, **options)
    join = compile_kernel(triton_kernel._join, constants, types, case.capability)
    return launch, attend, join


def compile_walk(capability: int) -> Used:
    """Return what the walk down trees of 31 nodes needs."""
    types = dict.fromkeys(("sampled_ptr", "rows_ptr", "tokens_ptr"), "*i64")
    integers = ("draft_tokens_ptr", "parents_ptr", "first_rows_ptr", "num_tokens_ptr")
    types |= dict.fromkeys(integers, "*i32")
    return compile_kernel(kernels._walk, {"BLOCK": 32}, types, capability, num_warps=1)


def is_bad(case: Case, launch: gpu_launch.Launch, attend: Used, join: Used) -> bool:
    of_program, of_processor = (kib * 1024 for kib in SHARED_MEMORY_KIB[case.capability])
    programs = gpu_launch.programs_at_once(launch.rows)
    fits = (
        programs * launch.num_warps * 32 * attend.registers <= REGISTERS
        and programs * (attend.shared + 1024) <= of_processor
    )
    # This Triton has no matrix products for devices before Ampere, so that registers never suffice.
    spills = case.capability >= 80 and (attend.stack > 0 or join.stack > 0)
    return spills or attend.shared > of_program or (case.capability in DATA_CENTRE and not fits)


def compile_launches(launches: list[tuple[str, str]], every: bool) -> None:
    """Compile launches, one for each device or by turns."""
    for number, (name, text) in enumerate(launches):
        for capability in DATA_CENTRE if every else [DATA_CENTRE[number % len(DATA_CENTRE)]]:
            print(
                f"{name} on sm_{capability}: {compile_launch(name, text, capability)}", flush=True
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every case, for three devices")
    parser.add_argument("--launches", type=argparse.FileType(), help="JSON, a list of `launches`")
    arguments = parser.parse_args()
    if arguments.launches:
        compile_launches(json.load(arguments.launches), arguments.all)
    bad = 0
    print(
        "| device | dtype | cache | head size | group | block | rows | tile | warps | registers "
        "| spilled bytes |"
    )
    print("| --- | --- | --- " + 8 * "| ---: " + "|", flush=True)
    for case in all_cases() if arguments.all else CASES:
        launch, attend, join = compile_case(case)
        is_wrong = is_bad(case, launch, attend, join)
        bad += is_wrong
        names = (TYPES[case.dtype], TYPES[case.cache_dtype or case.dtype])
        sizes = (case.head_size, case.group, case.block_size)
        cells = (f"sm_{case.capability}", *names, *sizes, launch.rows, launch.tile)
        cells = (*cells, launch.num_warps, attend.registers, attend.stack)
        print("|", " | ".join(map(str, cells)), "|", "TOO MUCH" if is_wrong else "", attend, join)
        sys.stdout.flush()
    for capability in DATA_CENTRE:
        walk = compile_walk(capability)
        bad += walk.stack > 0
        print(f"The walk on sm_{capability}: {walk}", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
