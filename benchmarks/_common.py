"""What all benchmarks share: options, runs in turns, the description of the machine, flat rows."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from vllm_trie.demo import engines

sys.path.append(str(Path(__file__).parents[1]))  # for `tools`

Key = TypeVar("Key", bound=Hashable)
Row = dict[str, Any]


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows to this file")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each method, in turns")
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own messages")
    return parser


def in_turns(
    runs: Mapping[Key, Callable[[], Any]], repeats: int
) -> dict[Key, list[tuple[float, Any]]]:
    """Run everything once, `repeats` times over, so that a slow minute hits all alike.

    Returns:
        For each run the seconds that it took and what it returned, a pair for each repeat. The
        order is turned round in every other repeat.
    """
    found: dict[Key, list[tuple[float, Any]]] = {key: [] for key in runs}
    for repeat in range(repeats):
        for key in runs if repeat % 2 == 0 else reversed(runs):
            start = time.perf_counter()
            result = runs[key]()
            found[key].append((time.perf_counter() - start, result))
    return found


def median_seconds(timed: Sequence[tuple[float, Any]]) -> float:
    """Median of the seconds that `in_turns` measured."""
    return median(seconds for seconds, _ in timed)


def median_ratio(base: Sequence[tuple[float, Any]], timed: Sequence[tuple[float, Any]]) -> float:
    """Speed over another's, of what `in_turns` measured in the same turns.

    The median of the turns' ratios: the machine's speed drifts, and less within a turn than over
    all of them.
    """
    return median(theirs / ours for (theirs, _), (ours, _) in zip(base, timed, strict=True))


def machine() -> str:
    """The machine and the versions, in one line."""
    parts = [_processor(), f"{os.cpu_count()} cores"]
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        parts.append(f"OMP_NUM_THREADS={threads}")
    parts.append(f"Python {platform.python_version()}")
    for name in ("vllm", "torch"):
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def quietly(
    run: Callable[[argparse.Namespace], list[Row]], options: argparse.Namespace
) -> list[Row]:
    """The rows that `run` measures; nothing that engines print is shown, unless asked for.

    The environment is set first: torch and vLLM must be imported by `run`, not before.
    """
    engines.set_environment(options.verbose)
    with engines.silence(not options.verbose):
        return run(options)


def finish(rows: Sequence[Row], json_path: Path | None, columns: Sequence[str]) -> None:
    """Print the rows as a table of `columns` and write all of them, if a path was given."""
    table = Table(title=machine(), title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    # Redirected output has no width of its own; do not fold it.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if json_path is not None:
        described = [{"machine": machine(), **row} for row in rows]
        json_path.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
