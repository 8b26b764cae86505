"""The GPU's classes in an engine, as far as a CPU can run them, and the way to a GPU's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from tests.engine.conftest import needs_triton
from tests.processes import run_program, run_python
from vllm_trie.vllm_hooks import ledger
from vllm_trie.vllm_hooks.setup import support
from vllm_trie.vllm_hooks.setup.config_keys import CONFIG_KEY, VERIFICATION
from vllm_trie.vllm_hooks.worker import cuda_worker


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What the program in Triton's interpreter found; it takes half a minute."""
    return run_program("tests.engine.gpu_classes_run", TRITON_INTERPRET="1")


@needs_triton
def test_tokens_are_those_of_plain_decoding(result) -> None:
    assert result["with_trees"] == result["plain"]
    assert result["tokens_per_step"] > 1.5


@needs_triton
def test_every_part_had_work(result) -> None:
    counts = result["counts"]  # of all layers
    assert counts["trees"] > 5
    assert counts["chunks"] > 1
    assert counts["plain"] > 1
    assert counts["moved"] > 5


@needs_triton
def test_the_check_passes_what_works(result) -> None:
    assert result["checked_steps"] == 2 * 2 * 2 + 2  # steps, launches, splits; through layers
    assert result["check"] < 1e-6


@needs_triton
def test_the_check_refuses_what_is_broken(result) -> None:
    said = dict(
        zip(
            ("kernel", "layers", "chunks", "moves", "layout", "fault"),
            result["refusals"].values(),
            strict=True,
        )
    )
    words = {
        "kernel": "the kernel's error is",
        "layers": "a step of layer",
        "chunks": "does not leave prefill chunks to vLLM's kernel",
        "moves": "moving KV in the cache",
        "layout": "lays out the KV cache",
        "fault": "a fault of the device",
    }
    for part, message in said.items():
        assert words[part] in message, part
        assert "the engine does not start" in message


@needs_triton
def test_kernels_compile_for_the_devices_that_vllm_takes(tmp_path) -> None:
    # Fails if a kernel spills registers, or more of them are assumed to fit than a device has.
    done = run_python("-m", "tests.engine.gpu_compile_run", TRITON_CACHE_DIR=str(tmp_path))
    assert done.stdout.count("| sm_") == 4


# -- a platform that says it is a GPU --------------------------------------------------------------


def gpu_config(allow_untested_gpu: bool = True) -> Any:
    from tests.engine.test_configuration import TREES, engine_config

    return engine_config(speculative_config={**TREES, "allow_untested_gpu": allow_untested_gpu})


def test_a_gpu_is_refused_unless_the_user_allows_it(monkeypatch) -> None:
    found, allowed = gpu_config(allow_untested_gpu=False), gpu_config()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    with pytest.raises(ValueError, match="allow_untested_gpu=True") as caught:
        support.choose_verification(found, "ngram_trie", "tree")
    assert "never run on a GPU" in str(caught.value)
    assert support.choose_verification(allowed, "ngram_trie", "auto") == "tree"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"backend": SimpleNamespace(name="FLASH_ATTN")}, "attention_backend='FLASH_ATTN'"),
        ({"cache_dtype": "float16"}, "kv_cache_dtype='float16' is not the model's"),
        ({"cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' is not supported"),
    ],
)
def test_settings_that_a_gpu_cannot_have(monkeypatch, changes, said) -> None:
    found = gpu_config()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    for name, value in changes.items():
        part = found.attention_config if name == "backend" else found.cache_config
        object.__setattr__(part, name, value)
    with pytest.raises(ValueError, match=said) as caught:
        support.choose_verification(found, "ngram_trie", "tree")
    assert str(caught.value).count("\n- ") == 2  # and that chains run


def test_other_accelerators_are_refused(monkeypatch) -> None:
    found = gpu_config()
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ValueError, match="neither a CPU nor an NVIDIA GPU"):
        support.choose_verification(found, "ngram_trie", "tree")


def test_the_ledger_fits_the_gpus_symbols() -> None:
    findings = ledger.check(patch for patch in ledger.PATCHES if patch.platform == "cuda")
    assert [found for found in findings if found.status != "ok"] == []
    assert len(findings) > 10


def test_nothing_serves_before_the_check(monkeypatch) -> None:
    done = []
    worker = object.__new__(cuda_worker.TreeGPUWorker)
    adapter = SimpleNamespace(calibrate=lambda: done.append("costs"))
    worker.model_runner = object.__new__(cuda_worker.TreeGPUModelRunner)
    worker.model_runner.adapter = adapter
    own_part = {CONFIG_KEY: {VERIFICATION: "tree"}}
    worker.vllm_config = SimpleNamespace(additional_config=own_part)
    monkeypatch.setattr(
        cuda_worker.Worker, "compile_or_warm_up_model", lambda self: done.append("warm-up")
    )
    monkeypatch.setattr(cuda_worker, "check_device", lambda runner: done.append("check"))
    worker.compile_or_warm_up_model()
    assert done == ["check", "warm-up", "costs"]

    def fail(runner: Any) -> None:
        raise RuntimeError("wrong results")

    done.clear()
    monkeypatch.setattr(cuda_worker, "check_device", fail)
    with pytest.raises(RuntimeError, match="wrong results"):
        worker.compile_or_warm_up_model()
    assert done == []


def test_profiling_sees_the_logits_of_a_step_with_trees(monkeypatch) -> None:
    import torch

    rows = []

    class Model:
        def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
            rows.append(len(states))
            return states.new_zeros(len(states), 7)

    stock = cuda_worker.gpu_model_runner.GPUModelRunner
    monkeypatch.setattr(stock, "_dummy_sampler_run", lambda self, hidden_states: "sampled")
    runner = object.__new__(cuda_worker.TreeGPUModelRunner)
    runner.model, runner.sampler = Model(), None
    runner.max_num_reqs, runner.num_spec_tokens, runner.max_num_tokens = 8, 32, 200
    assert runner._dummy_sampler_run(torch.zeros(8, 4)) == "sampled"
    assert rows == [200]
    runner.max_num_tokens = 8192
    runner._dummy_sampler_run(torch.zeros(8, 4))
    assert rows[1:] == [8 * 33]
