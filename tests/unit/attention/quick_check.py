"""Compares replayed operations with those of Triton's stock interpreter; run as a program with
TRITON_INTERPRET=1. Prints the outputs that differ, and how many were compared."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl

from tests.unit.attention.quick_interpreter import replay_operations

SIZE = 8
NUM_ROWS: tl.constexpr = 25
DTYPES = {
    "floats": (torch.float32, torch.float32),
    "halves": (torch.float16, torch.float32),
    "bfloats": (torch.bfloat16, torch.float32),
    "integers": (torch.int32, torch.int64),
    "bytes": (torch.uint8, torch.int16),
    "truths": (torch.bool, torch.int32),
}


@triton.jit
def _half(x):
    return x // 2 + x % 3


@triton.jit
def _write(out, row, values, SIZE: tl.constexpr):
    tl.store(out + row * SIZE + tl.arange(0, SIZE), values)


@triton.jit
def _operations(x, y, out, counts, limit, scale, IS_FLOAT: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    program = tl.program_id(0)
    mask = places < limit
    a = tl.load(x + places)
    first = tl.load(y)
    b = tl.load(y + places, mask=mask, other=3)
    out += program * NUM_ROWS * SIZE
    _write(out, 0, a + b, SIZE)
    _write(out, 1, a * b - first, SIZE)
    _write(out, 2, tl.where(mask & (a > b), a, 1), SIZE)
    _write(out, 3, tl.maximum(a, b), SIZE)
    # Whether `first` is true decides what is done; at first it is not.
    _write(out, 4, tl.load(x + limit - 1, mask=limit > 2, other=first) + places, SIZE)
    _write(out, 5, tl.load(x + program, mask=limit > 2, other=0.0) + places, SIZE)
    _write(out, 6, (a != b) | (places == program), SIZE)
    _write(out, 7, _half(places + limit), SIZE)
    _write(out, 8, (places << 2) ^ (places - limit), SIZE)
    _write(out, 9, places.to(tl.float32) * scale, SIZE)
    _write(out, 10, -(a.to(tl.float32)) / 3, SIZE)
    square = a.to(tl.float32)[:, None] * b.to(tl.float32)[None, :]
    _write(out, 11, tl.sum(square, axis=1), SIZE)
    _write(out, 12, tl.max(square, axis=0), SIZE)
    _write(out, 13, tl.argmax(square, axis=1), SIZE)
    _write(out, 14, tl.sum(tl.dot(square, tl.trans(square)), axis=0), SIZE)
    _write(out, 15, tl.zeros([SIZE], tl.int32) + tl.cdiv(limit, 2), SIZE)
    _write(out, 16, tl.cumsum(places * limit, axis=0), SIZE)
    if IS_FLOAT:
        _write(out, 17, tl.exp(a.to(tl.float32)) + tl.log(b.to(tl.float32) + 9.0), SIZE)
        _write(out, 18, tl.minimum(a, -0.0), SIZE)
    else:
        _write(out, 17, a.to(tl.int64) >> 1, SIZE)
        _write(out, 18, tl.abs(a.to(tl.int32) - 4), SIZE)
    total = 0
    for i in range(limit):
        total += i * i
    _write(out, 19, places * 0 + total, SIZE)
    _write(out, 21, (a >= b) + (a <= b), SIZE)  # of one bit
    _write(out, 22, tl.load(x + places).to(tl.float32) * 0.0, SIZE)
    _write(out, 23, tl.load(x + places).to(tl.float32) * -0.0, SIZE)
    halves, others = tl.split(tl.reshape(a.to(tl.float32), (SIZE // 2, 2)))
    _write(out, 20, tl.reshape(tl.join(others, halves), (SIZE,)), SIZE)
    if limit > 2 and program == 0:
        _write(out, 24, a.to(tl.int32, bitcast=False), SIZE)
    tl.atomic_add(counts + places % 3, 1, mask=mask)


def outputs() -> dict[str, torch.Tensor]:
    """Run the kernel for all types, with several values each; a replay follows each recording."""
    results = {}
    for seed, (name, dtypes) in enumerate(DTYPES.items()):
        generator = torch.Generator().manual_seed(seed)
        for limit, scale in ((SIZE, 0.5), (1, -2.0), (3, 0.5), (2, 1e3)):
            x, y = (torch.randint(0, 9, (SIZE,), generator=generator).to(dtype) for dtype in dtypes)
            y[0] = limit % 2
            out = torch.full((2, NUM_ROWS, SIZE), -7.0, dtype=torch.float64)
            counts = torch.zeros(3, dtype=torch.int32)
            arguments: Any = (x, y, out, counts, limit, scale)
            _operations[(2,)](*arguments, IS_FLOAT=x.is_floating_point(), SIZE=SIZE)
            results[f"{name}, {limit}"] = torch.cat([out.flatten(), counts.double()])
    return results


def main() -> int:
    expected = outputs()
    replay_operations()
    recorded, replayed = outputs(), outputs()
    bad = 0
    for name, result in expected.items():
        for other in (recorded[name], replayed[name]):
            differs = result.view(torch.int64) != other.view(torch.int64)
            rows = differs.nonzero() // SIZE % NUM_ROWS
            bad += len(rows)
            print("ok " if not len(rows) else "BAD", name, sorted(set(rows.flatten().tolist())))
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
