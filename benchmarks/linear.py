"""vLLM's linear layers on a CPU, by rows: what a step pays for each further token.

A step of one request without drafts has one row, with a tree one more for each node.

    OMP_NUM_THREADS=1 python benchmarks/linear.py
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from support.harness import Row, interleave, option_parser, report_quietly

COLUMNS = ("dtype", "outputs", "inputs", "rows", "ms", "over_one_row")


def run(options: argparse.Namespace) -> list[Row]:
    """Time each shape and dtype at each number of rows; the fastest of the repeats counts."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    rows: list[Row] = []
    num_inputs, num_outputs = options.inputs, options.outputs
    for name in options.dtypes:
        dtype = getattr(torch, name)
        layer: Any = torch.nn.Linear(num_inputs, num_outputs, bias=False, dtype=dtype)
        layer.requires_grad_(False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        runs = {
            num_rows: partial(call, layer, torch.randn(num_rows, num_inputs).to(dtype), options)
            for num_rows in options.rows
        }
        interleave(runs, 1)  # prepares the kernels
        timed = interleave(runs, options.repeats)
        ms = {
            num_rows: 1e3 * min(seconds for seconds, _ in repeats) / options.calls
            for num_rows, repeats in timed.items()
        }
        for num_rows in options.rows:
            size = {"dtype": name, "outputs": num_outputs, "inputs": num_inputs, "rows": num_rows}
            over = ms[num_rows] / ms[options.rows[0]]
            rows.append({**size, "ms": ms[num_rows], "over_one_row": over})
    return rows


def call(layer: Any, values: torch.Tensor, options: argparse.Namespace) -> None:
    """Compute a layer as often as a repeat does."""
    for _ in range(options.calls):
        layer.cpu_linear(values, layer.weight, None)


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__, repeats=5, smoke={"rows": [1, 2], "calls": 1})
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 9, 17, 33, 64])
    parser.add_argument("--inputs", type=int, default=576, help="default: of SmolLM2")
    parser.add_argument("--outputs", type=int, default=3072, help="default: of SmolLM2")
    parser.add_argument("--calls", type=int, default=50, help="in each repeat")
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


if __name__ == "__main__":
    main()
