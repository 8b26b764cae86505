"""Engines in processes of their own: tensor parallel, compiled, asynchronously scheduled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.beam.cases import few_cases
from tests.processes import run_python


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="multiprocess, tensor parallel"),
        pytest.param({"enforce_eager": False}, id="multiprocess, compiled"),
        pytest.param({"asynchronous": True}, id="asynchronous scheduling"),
    ],
)
def test_engine_in_its_own_processes(options: dict[str, Any]):
    done = run_python(
        *("-m", "tests.engine.beam.mode_run", json.dumps(options)),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        OMP_NUM_THREADS="1",
        # vLLM wants a NUMA node per worker if it binds threads by itself.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    expected = 2 * sum(case.beam_width for case in few_cases())
    assert f"compared {expected} hypotheses" in done.stdout, done.stderr[-3000:]
