"""The benchmarks that matter on a GPU, one after another: `make bench-gpu`.

Writes NAME.json, NAME.txt (the table) and, where matplotlib is installed, NAME.png and NAME.svg.
A benchmark that fails does not stop the others; the exit status is 1 then. Without `--model` the
engines have random weights in the shape of Llama 3 8B: what steps cost, not how good drafts are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FOLDER))

from support.bars import draw_bars  # noqa: E402 - found by the line before
from support.device import write_dummy_model  # noqa: E402
from support.harness import Row  # noqa: E402


class Benchmark(NamedTuple):
    """A script of the folder above, and its chart."""

    name: str
    options: tuple[str, ...]
    takes_model: bool
    value: str
    """Column of the heights."""
    category: Callable[[Row], str]
    method: str = "method"
    """Column of the bars' names."""


BENCHMARKS = (
    Benchmark(
        "attention",
        ("--dtypes", "bfloat16", "--contexts", "512", "2048", "8192", "32768"),
        False,
        "ratio_to_stock",
        lambda row: f"context {row['context']}, {row['nodes']} nodes",
        "kernel",
    ),
    Benchmark(
        "peers",
        ("--workload", "shipped", "--repeats", "3", "--max-tokens", "128"),
        True,
        "ratio_to_plain",
        lambda row: str(row["category"]),
    ),
    Benchmark(
        "load",
        ("--nodes", "8", "--batch-sizes", "1", "8", "32", "--requests-per-slot", "4"),
        True,
        "ratio_to_plain",
        lambda row: f"{row['prompts']}, {row['batch_size']} requests",
    ),
    Benchmark(
        "beam",
        ("--widths", "4", "8", "--prompt-lens", "50", "1500", "--num-prompts", "1", "8"),
        True,
        "ratio_to_trie",
        lambda row: f"{row['prompt_len']} tokens, width {row['beam_width']} × {row['num_prompts']}",
    ),
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or `arguments`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--model", default="", help="folder or name; random weights if left out")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    return parser.parse_args(arguments)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each benchmark, by name; writes the model without weights if needed."""
    model = ["--model", options.model]
    if not options.model:
        folder = write_dummy_model(options.out / "dummy-8b")
        model = ["--model", str(folder), "--load-format", "dummy"]
    return {
        benchmark.name: [
            sys.executable,
            str(FOLDER / f"{benchmark.name}.py"),
            *benchmark.options,
            *("--device", options.device, "--json", str(options.out / f"{benchmark.name}.json")),
            *(model if benchmark.takes_model else ()),
        ]
        for benchmark in BENCHMARKS
        if benchmark.name in options.only
    }


def chart(benchmark: Benchmark, folder: Path) -> list[Path]:
    """Draw the rows that a benchmark has written; return the files."""
    rows = json.loads((folder / f"{benchmark.name}.json").read_text(encoding="utf-8"))
    values = {
        (benchmark.category(row), str(row[benchmark.method])): row[benchmark.value]
        for row in rows
        if row.get(benchmark.value) is not None
    }
    return draw_bars(
        values,
        folder / benchmark.name,
        title=benchmark.name,
        ylabel=benchmark.value.replace("_", " "),
        footnote=rows[0]["machine"],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; return the exit status."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    has_plots = importlib.util.find_spec("matplotlib") is not None
    for name, command in commands(options).items():
        print(f"== {name}: {' '.join(command[1:])}", flush=True)
        with (options.out / f"{name}.txt").open("w", encoding="utf-8") as table:
            done = subprocess.run(command, stdout=table, check=False)
        print((options.out / f"{name}.txt").read_text(encoding="utf-8"), flush=True)
        if done.returncode:
            failed.append(f"{name} (status {done.returncode})")
        elif has_plots:
            chart(
                next(benchmark for benchmark in BENCHMARKS if benchmark.name == name), options.out
            )
    if not has_plots:
        print("no charts: matplotlib is not installed", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
