"""Replayed operations give the bits of Triton's stock interpreter."""

import importlib.util

import pytest

from tests.processes import run_python


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_replayed_operations_are_those_of_the_stock_interpreter():
    result = run_python(
        *("-m", "tests.unit.attention.quick_check"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1"
    )
    # Of six pairs of types with four limits each, the recorded and the replayed outputs.
    assert result.stdout.count("ok ") == 6 * 4 * 2
