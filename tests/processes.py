"""Processes of their own for tests: programs that run to their end, and waiting for servers.

A time limit that fits an idle machine fails on a busy one, so a process may take long as long as
it makes progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
FORKED = Path(__file__).parent / "forked"
UNLISTED = Path(__file__).parent / "unlisted"
LIMIT_S = 900.0
IDLE_LIMIT_S = 120.0


def environment(spawns: bool = False, **variables: str) -> dict[str, str]:
    """Return the environment of a process that tests start.

    Args:
        spawns: whether vLLM's processes start as in production, see `forked/sitecustomize.py`.
        variables: in addition to this process's own. A pytest that runs there is no worker of this
            one.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    merged = {**inherited, **variables}
    if not spawns:
        merged["PYTHONPATH"] = os.pathsep.join([str(FORKED), merged.get("PYTHONPATH", "")])
    return merged


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold a lock between all test processes of this user, for the start of several processes."""
    path = Path(tempfile.gettempdir()) / f"vllm-trie-tests-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cpu_seconds(leader: int) -> float:
    """Return the CPU time of a process, its descendants in any session, and those that ended."""
    seconds = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def wait_for(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, limit: float = LIMIT_S
) -> None:
    """Wait until `ready()` is true.

    Args:
        ready: asked twice a second, and when the process ends.
        process: its CPU time and that of its descendants count as progress.
        log: its growth counts as progress.
        limit: of the whole wait, in seconds.

    Raises:
        RuntimeError: with the end of the log, if the process ends first, makes no progress for
            `IDLE_LIMIT_S`, or exceeds the limit.
    """
    start = last_progress = time.monotonic()
    seen = (0, 0)
    while True:
        ended = process.poll() is not None  # asked first: it may end while `ready` looks
        if ready():
            return
        now = time.monotonic()
        progress = (int(5 * cpu_seconds(process.pid)), log.stat().st_size)
        if progress != seen:
            seen, last_progress = progress, now
        if ended:
            problem = f"the process ended with status {process.returncode}"
        elif now - start > limit:
            problem = f"the process was not ready within {limit:g} s"
        elif now - last_progress > IDLE_LIMIT_S:
            problem = f"the process made no progress for {IDLE_LIMIT_S:g} s"
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
            continue
        raise RuntimeError(f"{problem}; its log ends:\n{log.read_text(errors='replace')[-6000:]}")


def end(process: subprocess.Popen[bytes], patience: float = 20.0) -> None:
    """End a session and its leader's descendants in others; the leader has `patience` seconds."""
    descendants = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    psutil.wait_procs(descendants, patience)


def run_python(
    *arguments: str, timeout: float = LIMIT_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's root; fail with what it printed if it fails.

    Args:
        arguments: of the interpreter.
        timeout: in seconds.
        variables: see :func:`environment`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=environment(**variables),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            wait_for(lambda: process.poll() is not None, process, errors, timeout)
        finally:
            end(process, patience=5.0)
        texts = [path.read_text(errors="replace") for path in (out, errors)]
    assert process.returncode == 0, texts[0][-6000:] + texts[1][-12000:]
    return subprocess.CompletedProcess(process.args, process.returncode, *texts)


def run_program(module: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """Return the JSON object that a program of the tests prints after ``RESULT``."""
    done = run_python("-m", module, *arguments, OMP_NUM_THREADS="1", **variables)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def note_lines(logger_name: str, lines: list[str]) -> None:
    """Add the lines of one of the plugin's loggers, and of those below it, to a list, in a program
    whose engines set vLLM's loggers up: that would take the handler away."""
    import vllm.logger

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    vllm.logger.dictConfig = lambda config: None
    logger = logging.getLogger(logger_name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
