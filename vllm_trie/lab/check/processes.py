"""A process for each part, so that none takes the others with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from vllm_trie.lab.check.parts import Outcome, Part, Settings
from vllm_trie.lab.check.report import PartReport

CHILD = ("-m", "vllm_trie.lab.check")
"""Arguments of Python that run one part, see ``__main__.py``."""
_LOG_LINES = 30
_LOG_WIDTH = 300


def run_parts(
    parts: Sequence[Part],
    settings: Settings,
    limit_s: float,
    child: Sequence[str] = CHILD,
    starting: Callable[[Part], None] = lambda part: None,
) -> Iterator[PartReport]:
    """Run the parts one after another and yield what became of each.

    Args:
        parts: In this order.
        settings: Of all parts.
        limit_s: Seconds that a part may take; its process and all that it started end then.
        child: The program, as arguments of this Python.
        starting: Called before each part.
    """
    failed: set[str] = set()
    for part in parts:
        if part.needs in failed:
            text = f"left out: the part “{part.needs}” failed"
            report = PartReport(name=part.name, seconds=0.0, status="failed", summary=text)
        else:
            starting(part)
            report = _run(part, settings, limit_s, child)
        if report.status != "passed":
            failed.add(part.name)
        yield report


def _run(part: Part, settings: Settings, limit_s: float, child: Sequence[str]) -> PartReport:
    start = time.monotonic()
    log, result = settings.folder / "log.txt", settings.folder / "result.json"
    result.unlink(missing_ok=True)
    arguments = [part.model_dump_json(), settings.model_dump_json(), str(result)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *child, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
            ended = _describe_end(process.returncode)
        except subprocess.TimeoutExpired:
            ended = f"stopped at its limit of {limit_s:g} s"
        finally:
            # Engines may have processes of their own, which outlive the one that started them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    report = PartReport(
        name=part.name, seconds=time.monotonic() - start, status="failed", summary=ended
    )
    tail = _tail(log)
    if (outcome := _read(result)) is not None and process.returncode == 0:
        report = report.model_copy(update=dict(outcome))
    elif tail and process.returncode == 1:
        report.summary = f"{ended}: {tail[-1]}"
    if report.status == "failed":
        report.log = tuple(tail)
    return report


def _describe_end(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with status {status}" + (" and without a result" if status == 0 else "")


def _read(result: Path) -> Outcome | None:
    try:
        return Outcome.model_validate_json(result.read_bytes())
    except (OSError, ValidationError):
        return None


def _tail(log: Path) -> list[str]:
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = deque((line.rstrip() for line in file if line.strip()), _LOG_LINES)
    return [line[:_LOG_WIDTH] for line in lines]
