"""An engine with two tensor-parallel ranks, in processes of its own."""

from __future__ import annotations

import pytest

from tests.engine.beam.cases import few_cases
from tests.processes import run_python


@pytest.mark.slow
def test_tensor_parallel_engine_in_its_own_processes():
    done = run_python(
        *("-m", "tests.engine.beam.tensor_parallel_run"),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        OMP_NUM_THREADS="1",
        # vLLM wants a NUMA node per worker if it binds threads by itself.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    expected = sum(case.beam_width for case in few_cases())
    assert f"compared {expected} hypotheses" in done.stdout, done.stderr[-3000:]
