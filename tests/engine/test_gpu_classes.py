"""The GPU's classes in an engine, as far as a CPU can run them, and the way to a GPU's engine."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.conftest import needs_triton
from tests.newer_vllm import newer_vllm
from tests.processes import run_program, run_python
from vllm_trie.drafts.engine.config import VERIFICATION
from vllm_trie.drafts.engine.workers import cuda_worker
from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger.table import check_entry
from vllm_trie.hooks.start.additional_config import CONFIG_KEY


@pytest.fixture(scope="module")
def started():
    """Engines that start as on a GPU, in Triton's interpreter; the program compares their tokens
    with those without drafts itself, and looks at an engine whose check finds a fault."""
    return run_program("tests.engine.gpu_startup")


@needs_triton
@pytest.mark.parametrize("name", ["union", "trees"])
def test_no_kernel_is_compiled_while_serving(started, name):
    """By the specializations of all launches, those of vLLM's kernels too.

    The program fails where memory profiling, warm-up, graphs, the checks or requests do.
    """
    assert started[name]["new launches"] == []


@needs_triton
def test_the_start_on_the_newer_vllm():
    """An engine with the defaults starts there, drafts chains and serves a search.

    Trees and unions start by the same overrides, and `test_v2.py` has their steps.
    """
    started = run_program("tests.engine.gpu_startup", "chains", **newer_vllm())
    assert started["chains"]["new launches"] == []


@needs_triton
def test_the_check_passes_what_works(started):
    trees = started["trees"]
    # Steps, launches, splits; through layers, and one for each launch.
    assert trees["checked_steps"] == 2 * 2 * 2 + 2 + 1
    assert trees["largest_error"] < 1e-6


@needs_triton
def test_the_check_refuses_what_is_broken(started):
    said = dict(
        zip(
            ("kernel", "layers", "chunks", "moves", "layout", "fault"),
            started["trees"]["refusals"].values(),
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
def test_kernels_compile_for_the_devices_that_vllm_takes(started, tmp_path) -> None:
    """The plugin's, as they were launched at the start and by requests, and for more shapes."""
    launches = [one for one in started["launches"] if one[0].startswith("vllm_trie.")]
    launched = tmp_path / "launches.json"
    launched.write_text(json.dumps(launches))
    command = "-m", "tests.engine.gpu_compile_run", "--launches", str(launched)
    assert launches
    # Of the plugin's shapes none may spill registers or need more than is assumed to fit.
    done = run_python(*command, TRITON_CACHE_DIR=str(tmp_path))
    assert all(f"{name} on sm_" in done.stdout for name, _ in launches)
    assert done.stdout.count("| sm_") == 6
    assert done.stdout.count("The walk on sm_") == 3


@needs_triton
def test_steps_on_a_fake_device():
    """They wait for nothing but their event, queue each copy, and mix no tensors of host and
    device."""
    result = run_program("tests.engine.fake_device")
    controls = result.pop("controls")
    calls = result.pop("calls")
    launches = result.pop("launches")
    scenes = ("chains", "text_chains", "chains_ahead", "trees", "beams")
    assert result == {scene: [] for scene in scenes}
    # Between the tokens of a step and the launch of the next, in three steps that draft.
    assert calls["text_chains"] == [["_to_copy", "_take_drafts"]] * 3
    assert calls["chains_ahead"] == [[]] * 3
    # Searches take their step together; of items, the best of each are chosen apart.
    assert launches["free 8"] == launches["free 1"]
    chosen = launches["items 8"].pop("launches") - launches["items 1"].pop("launches")
    assert chosen == 7
    assert launches["items 8"] == launches["items 1"]
    assert [name for name, faults in controls.items() if not faults] == ["queued copy", "number"]
    assert len(controls) == 11


# -- a platform that says it is a GPU --------------------------------------------------------------


def test_the_ledger_fits_the_gpus_symbols():
    findings = [check_entry(entry) for entry in ledger.entries() if entry.platform == "cuda"]
    assert [finding for finding in findings if finding.status != "ok"] == []
    assert len(findings) > 10


@pytest.fixture(scope="module")
def on_cuda():
    """What the plugin does where vLLM's platform is CUDA."""
    return run_program("tests.engine.pretended_gpu")


@pytest.fixture
def pretended(on_cuda):
    """What it does to engines' configurations with drafts, and to the process."""
    return on_cuda | on_cuda["speculation"]


@pytest.fixture
def beams(on_cuda):
    """What it does to beam search."""
    return on_cuda["beams"]


@needs_triton
def test_the_plugin_leaves_the_cpus_worker_alone_on_a_gpu(pretended):
    # vLLM's CPU worker replaces torch.cuda's events and streams, and pinned memory, when it is
    # imported: whoever does so in a process that serves from a GPU breaks it, speculation or not.
    assert pretended["status"] == {"speculation": "ok", "beam": "ok"}
    assert pretended["cpu_modules"] == []
    assert pretended["torch_as_it_was"]
    assert pretended["cuda_starts"] == 0  # a front end that starts CUDA cannot fork


@needs_triton
def test_configurations_on_a_gpu(pretended):
    settings = pretended["settings"]
    for name in ("trees", "TRITON_ATTN", "FULL", "fp8"):
        module, _, worker = settings[name]["worker"].rpartition(".")
        assert getattr(sys.modules[module], worker) is cuda_worker.TreeGPUWorker
        assert settings[name]["v2"]
        assert settings[name]["async"]
        assert (settings[name]["verification"], settings[name]["tokens"]) == ("tree", 31)
    assert "Model Runner V1 is not supported on NVIDIA GPUs" in settings["V1"]["refused"]
    assert "attention_backend='FLASH_ATTN'" in settings["FLASH_ATTN"]["refused"]
    assert "kv_cache_dtype='fp8_e5m2'" in settings["fp8_e5m2"]["refused"]
    assert "'float16' is not the model's dtype" in settings["another dtype"]["refused"]
    assert "verification='chain' runs here" in settings["trees in stages"]["refused"]
    assert "needs asynchronous scheduling" in settings["synchronous stages"]["refused"]
    assert "enable_trace_replay is not supported with trees" in settings["trace replay"]["refused"]
    assert "no rank has all logits of a step" in settings["sharded sampling"]["refused"]


@needs_triton
@pytest.mark.parametrize(
    ("name", "asynchronous", "ahead"),
    [
        ("chains, synchronous", False, False),
        ("default", True, True),
        ("pipeline stages", True, False),
        ("KV connector", True, False),  # whose stores may wait for the device
        ("attention in chunks", True, False),  # whose lengths vLLM reads from the device
    ],
)
def test_chains_run_on_the_runner_that_vllm_prefers(pretended, name, asynchronous, ahead):
    chains = pretended["settings"][name]
    assert chains["ahead"] is ahead
    assert chains["verification"] == "chain"
    assert (chains["v2"], chains["async"], chains["tokens"]) == (True, asynchronous, 8)
    assert chains["worker"].endswith("TreeGPUWorker")


@needs_triton
def test_the_line_at_the_start_names_the_defaults(pretended):
    (line,) = [line for line in pretended["lines"] if "vllm-trie is on" in line]
    assert "chains, on Model Runner V2 with asynchronous scheduling" in line


@needs_triton
def test_large_batches_draft_less(pretended):
    tiers = {
        name: [(last, tokens) for _, last, tokens in pretended["settings"][name]["tiers"]]
        for name in pretended["settings"]
        if "refused" not in pretended["settings"][name]
    }
    assert tiers["default"] == [(64, 8), (128, 4), (256, 2), (1 << 20, 0)]
    taking_any = "any length by Triton", "Triton", "FlashAttention", "MLA without graphs"
    for name in (*taking_any, "no graphs"):
        assert tiers[name] == tiers["default"]
    for name in ("FlashInfer", "FlashInfer by configuration", "MLA"):
        assert tiers[name] == tiers["one length"]
    assert tiers["one length"] == [(16, 8), (64, 4), (1 << 20, 0)]
    assert tiers["trees"] == [(64, 31), (128, 15), (256, 7), (1 << 20, 0)]


@needs_triton
@pytest.mark.parametrize(
    ("num_running", "length"), [(64, 8), (128, 4), (256, 2), (512, 0), (1024, 0)]
)
def test_prefills_beside_running_requests(pretended, num_running, length):
    """Drafts take what the prompts of a step leave of its 8,192 tokens."""
    plain, drafting = pretended["loads"][str(num_running)]
    assert plain["running"] == drafting["running"] == num_running
    assert drafting["placeholders"] == length * num_running
    assert plain["prefill tokens"] == drafting["prefill tokens"] == 8 * 500


@needs_triton
def test_vllm_takes_the_backend_and_captures_attention_in_graphs(pretended):
    for name in ("default", "trees"):
        assert pretended["settings"][name]["graphs"] == "FULL_AND_PIECEWISE"
    chosen = pretended["chosen"]
    assert chosen["backend"] == "TreeTritonAttentionBackend"
    # The mode, and the graphs of a step of full drafts and of one with other lengths.
    assert chosen["graphs"]["FULL_AND_PIECEWISE"] == ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE"]
    assert chosen["graphs"]["FULL"] == ["FULL"] * 3
    assert "not supported" in chosen["mm_prefix"]


def test_nothing_serves_before_the_check(monkeypatch):
    done = []
    worker = object.__new__(cuda_worker.TreeGPUWorker)
    adapter = SimpleNamespace(warm_up=lambda: done.append("costs"))
    worker.model_runner = SimpleNamespace(adapter=adapter)
    own_part = {CONFIG_KEY: {VERIFICATION: "tree"}}
    worker.vllm_config = SimpleNamespace(additional_config=own_part)

    def warm_up(self: Any) -> None:
        done.append("warm-up")
        self._maybe_activate_jit_monitor()

    monkeypatch.setattr(cuda_worker.Worker, "compile_or_warm_up_model", warm_up)
    monkeypatch.setattr(
        cuda_worker.Worker, "_maybe_activate_jit_monitor", lambda self: done.append("monitor")
    )
    monkeypatch.setattr(
        cuda_worker, "loaded", lambda *part: [lambda runner: done.append(" of ".join(part))]
    )
    worker.compile_or_warm_up_model()
    assert done == ["checks of attention", "warm-up", "costs", "monitor"]

    def fail(runner: Any) -> None:
        raise RuntimeError("wrong results")

    done.clear()
    monkeypatch.setattr(cuda_worker, "loaded", lambda *part: [fail])
    with pytest.raises(RuntimeError, match="wrong results"):
        worker.compile_or_warm_up_model()
    assert done == []


@needs_triton
def test_beam_search_is_on_and_can_be_switched_off(beams):
    on = beams["default"]
    assert on["reason"] is on["scheduler"] is None
    assert on["lines"] == []
    # What vLLM chooses on a GPU, and what the tests in `beam/test_gpu.py` therefore run.
    assert on["v2"]
    assert on["asynchronous"]
    assert beams["with_chains"] == on
    assert "['beam_search']=False" in beams["off"]["reason"]
    assert "neither a CPU nor an NVIDIA GPU" in beams["other"]


@needs_triton
def test_caches_that_rows_cannot_share(beams):
    caches = beams["caches"]
    assert caches["full"] is caches["mla"] is caches["window"] is None
    assert "compressed" in caches["compressed"]
