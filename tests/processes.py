"""Python in a process of its own, for what must be set before vLLM is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_python(
    *arguments: str, timeout: float | None = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's root; fails with what it printed where it fails.

    A pytest in there knows nothing of this one: it is none of its workers.

    Args:
        arguments: of the interpreter.
        timeout: in seconds; None waits for ever.
        environment: variables beside this process's own.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done


def run_program(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON object that a program of the tests prints behind ``RESULT``."""
    done = run_python("-m", module, *arguments, OMP_NUM_THREADS="1", **environment)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))
