"""vLLM's linear layers on a CPU, by rows: what a step pays for each further token.

A step of one request without drafts has one row, with a tree one more for each node.

    OMP_NUM_THREADS=1 python benchmarks/linear.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from support.harness import Row, finish, option_parser, run_quietly

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
        for num_rows in options.rows:
            values = torch.randn(num_rows, num_inputs).to(dtype)
            seconds = []
            for _ in range(options.repeats + 1):  # the first run prepares the kernel
                start = time.perf_counter()
                for _ in range(options.calls):
                    layer.cpu_linear(values, layer.weight, None)
                seconds.append((time.perf_counter() - start) / options.calls)
            ms = 1e3 * min(seconds[1:])
            size = {"dtype": name, "outputs": num_outputs, "inputs": num_inputs, "rows": num_rows}
            one = next((row["ms"] for row in rows if row["dtype"] == name), ms)
            rows.append({**size, "ms": ms, "over_one_row": ms / one})
    return rows


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__, repeats=5, smoke={"rows": [1, 2], "calls": 1})
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 9, 17, 33, 64])
    parser.add_argument("--inputs", type=int, default=576, help="default: of SmolLM2")
    parser.add_argument("--outputs", type=int, default=3072, help="default: of SmolLM2")
    parser.add_argument("--calls", type=int, default=50, help="in each repeat")
    options = parser.parse_args()
    finish(run_quietly(run, options), options, COLUMNS)


if __name__ == "__main__":
    main()
