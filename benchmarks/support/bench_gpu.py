"""The benchmarks that matter on a GPU, one after another: `make bench-gpu`.

Writes NAME.json and NAME.txt (the table). A benchmark that fails does not stop the others; the exit
status is 1 then. Without `--model` the engines have random weights in the shape of Llama 3 8B: what
steps cost, not how good drafts are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(FOLDER))

from support.device import write_dummy_model  # noqa: E402 - found by the line before


class Benchmark(NamedTuple):
    """A script of the folder above."""

    name: str
    options: tuple[str, ...]
    takes_model: bool = True


BENCHMARKS = (
    Benchmark(
        "attention",
        ("--dtypes", "bfloat16", "--contexts", "512", "2048", "8192", "32768"),
        takes_model=False,
    ),
    Benchmark(
        "peers",
        ("--workload", "shipped", "--repeats", "3", "--max-tokens", "128"),
    ),
    Benchmark(
        "load",
        ("--nodes", "8", "--batch-sizes", "1", "8", "32", "--requests-per-slot", "4"),
    ),
    Benchmark(
        "beam",
        ("--widths", "4", "8", "--prompt-lens", "50", "1500", "--num-prompts", "1", "8"),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; return the exit status."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, command in commands(options).items():
        print(f"== {name}: {' '.join(command[1:])}", flush=True)
        with (options.out / f"{name}.txt").open("w", encoding="utf-8") as table:
            done = subprocess.run(command, stdout=table, check=False)
        print((options.out / f"{name}.txt").read_text(encoding="utf-8"), flush=True)
        if done.returncode:
            failed.append(f"{name} (status {done.returncode})")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
