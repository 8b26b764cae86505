"""The GPU kernel in Triton's interpreter: its results, not its speed, need no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_equals_float64_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.unit.attention.triton_check"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") >= 11
