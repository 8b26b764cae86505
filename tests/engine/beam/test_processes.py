"""Engines in processes of their own: tensor parallel, compiled, asynchronously scheduled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.beam.cases import few_cases


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="multiprocess, tensor parallel"),
        pytest.param({"enforce_eager": False}, id="multiprocess, compiled"),
        pytest.param({"asynchronous": True}, id="asynchronous scheduling"),
    ],
)
def test_engine_in_its_own_processes(options: dict[str, Any], pytestconfig: pytest.Config):
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "OMP_NUM_THREADS": "1",
        # vLLM wants a NUMA node per worker if it binds threads by itself.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    result = subprocess.run(
        [sys.executable, "-m", "tests.engine.beam.mode_run", json.dumps(options)],
        cwd=pytestconfig.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    expected = 2 * sum(case.beam_width for case in few_cases())
    assert f"compared {expected} hypotheses" in result.stdout, result.stderr[-3000:]
