"""Python in a process of its own, for what must be set before vLLM is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    *arguments: str, timeout: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in the repository's root; fails with what it printed where it fails.

    Args:
        arguments: of the interpreter.
        timeout: in seconds.
        environment: variables beside this process's own.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done
