"""Engines' configurations on a platform that says it is a GPU: trees, chains, beam search."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.engine.conftest import needs_triton
from tests.processes import run_program
from vllm_trie.vllm_hooks.worker import cuda_worker

pytestmark = needs_triton


@pytest.fixture(scope="module")
def pretended() -> dict[str, Any]:
    """What the plugin does where vLLM's platform is CUDA."""
    return run_program("tests.engine.beam.pretended_gpu_run")


@pytest.fixture
def speculation(pretended: dict[str, Any]) -> dict[str, Any]:
    return pretended["speculation"]


@pytest.fixture
def beams(pretended: dict[str, Any]) -> dict[str, Any]:
    return pretended["beams"]


def test_nothing_of_cuda_is_started_or_replaced(pretended, speculation) -> None:
    # vLLM's CPU worker replaces torch.cuda's events and streams, and pinned memory, when it is
    # imported: whoever does so in a process that serves from a GPU breaks it, speculation or not.
    assert speculation["status"] == {"speculation": "ok", "beam": "ok"}
    assert pretended["cpu_modules"] == []
    assert pretended["torch_as_it_was"]
    assert pretended["cuda_starts"] == 0  # a front end that starts CUDA cannot fork


# -- drafts ----------------------------------------------------------------------------------------


def test_configurations(speculation) -> None:
    assert "allow_untested_gpu=True" in speculation["not_allowed"]["refused"]
    allowed = speculation["allowed"]
    for name in ("default", "TRITON_ATTN", "FULL", "fp8"):
        module, _, worker = allowed[name]["worker"].rpartition(".")
        assert getattr(sys.modules[module], worker) is cuda_worker.TreeGPUWorker
        assert not allowed[name]["v2"]
        assert not allowed[name]["async"]
        assert allowed[name]["verification"] == "tree"
    assert "attention_backend='FLASH_ATTN'" in allowed["FLASH_ATTN"]["refused"]
    assert "kv_cache_dtype='fp8_e5m2'" in allowed["fp8_e5m2"]["refused"]


@pytest.mark.parametrize(
    ("name", "v2", "asynchronous", "tokens"),
    [
        ("chains", True, True, 8),
        ("chains, synchronous", True, False, 8),
        ("chains instead of trees", True, True, 8),
        ("chains on V1", False, False, 32),
    ],
)
def test_chains_run_on_the_runner_that_vllm_prefers(
    speculation, name: str, v2: bool, asynchronous: bool, tokens: int
) -> None:
    found = speculation["allowed"][name]
    assert found["verification"] == "chain"
    assert (found["v2"], found["async"], found["tokens"]) == (v2, asynchronous, tokens)
    assert found["worker"].endswith("TreeGPUWorker")


def test_vllm_takes_the_backend_and_captures_attention_in_graphs(speculation) -> None:
    assert speculation["allowed"]["default"]["graphs"] == "FULL_AND_PIECEWISE"
    chosen = speculation["chosen"]
    assert chosen["backend"] == "TreeTritonAttentionBackend"
    # The mode, and the graphs of a step of full drafts and of one with other lengths.
    both = ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"]
    assert chosen["graphs"]["FULL_AND_PIECEWISE"] == {"V1": both, "V2": both}
    assert chosen["graphs"]["FULL"] == {runner: ["FULL"] * 3 for runner in ("V1", "V2")}
    assert "not supported" in chosen["mm_prefix"]


# -- beam search -----------------------------------------------------------------------------------


def test_off_with_one_line_that_says_how_to_switch_it_on(beams) -> None:
    off = beams["default"]
    assert "never run on a GPU" in off["reason"]
    assert '{"vllm_trie": {"allow_untested_gpu": True}}' in off["reason"]
    assert off["scheduler"] == off["reason"]
    assert off["lines"] == [f"Native beam search is off, vLLM's own serves: {off['reason']}"]


def test_on_where_the_user_allows_it(beams) -> None:
    on = beams["allowed"]
    assert on["reason"] is on["scheduler"] is None
    (line,) = on["lines"]
    assert "never run on a GPU" in line
    # What vLLM chooses on a GPU, and what the tests in `beam/test_gpu.py` therefore run.
    assert on["v2"]
    assert on["asynchronous"]


def test_the_option_beside_others(beams) -> None:
    assert "['beam_search']=False" in beams["off"]["reason"]
    assert beams["off"]["lines"] == []
    assert "'yes' must be True or False" in beams["yes"]["refused"]
    with_trees = beams["with_trees"]
    assert with_trees["reason"] is None
    assert not with_trees["v2"]
    assert "neither a CPU nor an NVIDIA GPU" in beams["other"]


def test_caches_that_rows_cannot_share(beams) -> None:
    caches = beams["caches"]
    assert caches["full"] is caches["mla"] is None
    assert "SlidingWindowSpec" in caches["window"]
    assert "compressed" in caches["compressed"]
