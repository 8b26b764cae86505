"""vLLM's own CPU operations, for tests that compare with them."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(scope="session")
def vllm_operations() -> None:
    """Load vLLM's CPU operations into torch as vLLM itself would.

    There is one library for each instruction set; a process that loads two of them aborts, so the
    choice must be vLLM's.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("only vLLM's build for CPUs has these operations")
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        pytest.skip("only vLLM's build for x86 CPUs has these operations")
