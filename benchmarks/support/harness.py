"""The frame of every benchmark: options, interleaved runs, the machine, tables, JSON rows."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table

from support.quiet import Probe, probe_seconds
from vllm_trie.lab import local_engine, smollm2

Row = dict[str, Any]
Timed = Sequence[tuple[float, Any]]
"""Seconds and result of each repeat of a run."""
interleave = local_engine.interleave

_TURN_SECONDS = 1.0
_Result = TypeVar("_Result")


class Progress(NamedTuple):
    """How far an engine has come with a load."""

    seconds: float
    """Of its own steps; time in which other engines run does not count."""
    num_tokens: int
    """Output tokens of all requests."""


class _Smoke(argparse.Action):
    """Sets the options of a run of seconds; options behind it still count."""

    def __call__(self, parser: Any, namespace: Any, values: Any, flag: str | None = None) -> None:
        vars(namespace).update(self.const)


def option_parser(
    description: str | None,
    repeats: int = 3,
    smoke: Mapping[str, Any] | None = None,
) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark.

    Args:
        description: the script's docstring, shown as it is written.
        repeats: default of `--repeats`.
        smoke: what `--smoke` sets, by the options' names.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows to this file")
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="interleaved runs of each method"
    )
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own messages")
    parser.add_argument(
        "--smoke",
        action=_Smoke,
        nargs=0,
        const={"smoke": True, "repeats": 1, **(smoke or {})},
        default=False,
        help="tiny sizes: does it run, print and write? Measures nothing",
    )
    return parser


def add_model_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--model`: a folder, a name on the hub, or the word `smollm2`."""
    parser.add_argument(
        "--model",
        type=_model_folder,
        help=f"{what}; '{smollm2.NAME}' is SmolLM2-135M-Instruct, fetched on first use",
    )


def _model_folder(model: str) -> str:
    try:
        return smollm2.model_folder(model)
    except smollm2.FetchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def take_turns(loads: Sequence[Generator[Progress, None, _Result]]) -> list[_Result]:
    """Let engines work on a load each, the one with the fewest tokens for about a second.

    A slow spell of the machine then costs all of them the same.

    Args:
        loads: yield after each step.

    Returns:
        What each load returns at its end.
    """
    reached = dict.fromkeys(range(len(loads)), Progress(0.0, 0))  # without those that have ended
    results: dict[int, _Result] = {}
    while reached:
        index = min(reached, key=lambda i: (reached[i].num_tokens, i))
        until = reached[index].seconds + _TURN_SECONDS
        try:
            while reached[index].seconds < until:
                reached[index] = next(loads[index])
        except StopIteration as end:
            results[index] = end.value
            del reached[index]
    return [results[index] for index in range(len(loads))]


def median_seconds(timed: Timed) -> float:
    """Return the median duration of a run's repeats."""
    return median(seconds for seconds, _ in timed)


def median_ratio(base: Timed, timed: Timed) -> float:
    """Return the speed of a run over another's: the median of the ratios of each repeat.

    The machine's speed drifts, and less within a repeat than over all of them.
    """
    return median(theirs / ours for (theirs, _), (ours, _) in zip(base, timed, strict=True))


def machine() -> str:
    """Describe the machine and the versions in one line."""
    parts = [_processor(), f"{os.cpu_count()} cores"]
    # Only where a benchmark has used it: the import takes seconds.
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        parts.insert(0, torch.cuda.get_device_name())
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


def report(
    run: Callable[[argparse.Namespace], list[Row]],
    options: argparse.Namespace,
    columns: Sequence[str],
) -> list[Row]:
    """Measure rows between two probes of the machine, print and write them, and return them.

    The table has the `columns` that have values.
    """
    before = None if options.smoke else probe_seconds()
    rows = run(options)
    shown = [name for name in columns if any(row.get(name) is not None for row in rows)]
    print_table(shown, ([row.get(name) for name in shown] for row in rows), machine())
    write_json([{"machine": machine(), **row} for row in rows], options.json)
    if before is not None:
        print(Probe(before, probe_seconds()))
    return rows


def report_quietly(
    run: Callable[[argparse.Namespace], list[Row]],
    options: argparse.Namespace,
    columns: Sequence[str],
) -> None:
    """Report the rows that `run` measures, without what engines print unless `--verbose` is set.

    Sets the environment first: `run` imports torch and vLLM, not the module around it.
    """

    def silently(options: argparse.Namespace) -> list[Row]:
        with local_engine.silence(not options.verbose):
            return run(options)

    local_engine.set_environment(options.verbose)
    report(silently, options, columns)


def write_json(rows: Sequence[Row], path: Path | None) -> None:
    """Write the rows to `path`, if there is one."""
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def print_table(columns: Sequence[str], lines: Any, title: str | None = None) -> None:
    """Print a table: an iterable of lines with a value for each column."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_name = column in ("method", "workload", "measure")
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for line in lines:
        table.add_row(*map(_cell, line))
    # Redirected output has no width of its own; this one folds no table.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
