"""The GPU kernel in Triton's interpreter: its results, not its speed, need no GPU."""

import importlib.util

import pytest

from tests.processes import ROOT, run_python


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_equals_float64_in_the_interpreter():
    result = run_python(
        *("-m", "tests.extras.device_checks.unit.triton_check"),
        timeout=250,
        TRITON_INTERPRET="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(ROOT / "benchmarks"),
    )
    assert result.stdout.count("ok ") >= 20
