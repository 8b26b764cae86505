"""`vllm-trie validate`: the whole of it once, and each of its parts on something broken."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from vllm.plugins import load_general_plugins
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_model_runner

from tests.processes import run_python
from vllm_trie.drafts.engine.guard import GuardedDrafter
from vllm_trie.drafts.engine.verification import compaction, sampling
from vllm_trie.lab.check import beams, doctor, identity, kernels, speed
from vllm_trie.lab.check.parts import Settings
from vllm_trie.lab.tiny_model import model_path
from vllm_trie.searches.engine.scheduler.group import BeamGroup
from vllm_trie.tree import TokenTree


@pytest.mark.slow
def test_a_quick_run_of_a_part(tmp_path):
    path = tmp_path / "report.json"
    options = ["--quick", "--json", str(path), "--part", "beam search"]
    done = run_python("-m", "vllm_trie.cli", "validate", *options)
    assert done.stdout.startswith("# vllm-trie validate: passed\n")
    assert done.stderr.count(": passed") == 2  # that of the versions is always there
    report = json.loads(path.read_text())
    assert report["passed"] is True
    assert report["finished"] is True
    parts = {part["name"]: part for part in report["parts"]}
    assert {part["status"] for part in parts.values()} == {"passed"}
    assert parts["beam search, float32"]["summary"]
    assert any("native beam search" in line for line in report["safe"])


# -- broken on purpose, in this process -----------------------------------------------------------


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    load_general_plugins()  # before anything is broken: the plugin looks at what it patches
    folder = tmp_path_factory.mktemp("validate")
    return Settings(model=str(model_path()), heads=None, quick=True, folder=folder)


@pytest.fixture
def run(settings, engine, monkeypatch):
    """Run the work of a part that decodes, on engines that the tests share."""

    def start_engine(given: Any, dtype: str, longest: int, max_tokens: int, **options: Any) -> Any:
        limits = {"max_model_len": 832, "max_num_batched_tokens": 8 * 832}
        return engine(dtype=dtype, **limits | options)

    for module in (identity, beams, speed):
        monkeypatch.setattr(module, "start_engine", start_engine)

    if not identity._file(settings, "float32").exists():
        assert identity.decode_plainly(settings, "float32").status == "passed"
    return lambda function, *arguments: function(settings, *arguments)


TREES = (identity.compare_method, "float32", "ngram_trie", "tree")
CHAINS = (identity.compare_method, "float32", "ngram_trie", "chain")


BEAMS = (beams.check_beams, "float32")


@pytest.mark.parametrize("work", [TREES, CHAINS], ids=["trees", "chains"])
def test_what_works_passes(run, work):
    outcome = run(*work)
    assert outcome.status == "passed", outcome.summary


def test_the_speed_of_a_step(run, monkeypatch):
    monkeypatch.setattr(speed, "BATCH_SIZES", (1, 3))
    monkeypatch.setitem(speed.METHODS, speed.PEER, None)
    outcome = run(speed.measure, "float32")
    assert list(outcome.measured) == ["1", "3"]
    for size, row in outcome.measured.items():
        step = row["step"]
        tokens = step.pop("tokens")
        assert tokens > 1.5
        assert step.pop("waits") == 0  # Model Runner V1 counts none
        assert min(step.values()) > 0
        whole_ms = 1000 * int(size) * tokens / (row["plain_tokens_per_s"] * row["ngram_trie"])
        assert 0.002 < sum(step.values()) / whole_ms < 2  # another unit is off by 1000


def test_greedy_trees_without_moves_of_kv(run, monkeypatch):
    monkeypatch.setattr(compaction, "compact", lambda *_: None)
    outcome = run(*TREES)
    assert outcome.status == "failed"
    assert "greedy token" in outcome.summary


def test_chains_with_a_rejection_sampler_that_accepts_everything(run, monkeypatch):
    stock = rejection_sampler.rejection_sample

    def accept_all(drafted: Any, *arguments: Any, **options: Any) -> Any:
        *others, logits, bonus, metadata = arguments
        likeliest = logits.scatter(1, drafted.long()[:, None], 1e9)
        return stock(drafted, *others, likeliest, bonus, metadata, **options)

    monkeypatch.setattr(rejection_sampler, "rejection_sample", accept_all)
    outcome = run(*CHAINS)
    assert outcome.status == "failed"
    assert "greedy token" in outcome.summary


def test_seeds_that_do_not_count(run, monkeypatch):
    stock = sampling._metadata_of
    monkeypatch.setattr(
        sampling,
        "_metadata_of",
        lambda *arguments: dataclasses.replace(stock(*arguments), generators={}),
    )
    outcome = run(*TREES)
    assert outcome.status == "failed"
    assert outcome.summary.startswith("seeded output is not plain vLLM's")


def test_a_drafter_that_drafts_nothing_shows_nothing(run, monkeypatch):
    def propose(self: GuardedDrafter, requests: Any, prepared: Any = None) -> list[TokenTree]:
        return [TokenTree.empty()] * len(requests)

    monkeypatch.setattr(GuardedDrafter, "propose", propose)
    outcome = run(*CHAINS)
    assert (outcome.status, outcome.summary) == (
        "failed",
        "no drafted token was accepted, so nothing was verified",
    )


def worse(beam: dict[str, Any]) -> dict[str, Any]:
    return beam | {"score": beam["score"] - 0.1}


@pytest.mark.parametrize("broken", ["copies", "scores"])
def test_beam_search_with_wrong_kv_or_wrong_scores(run, monkeypatch, broken):
    if broken == "copies":
        copy = "copy_kv_cache_blocks_inplace"
        monkeypatch.setattr(gpu_model_runner, copy, lambda *arguments: None)
    else:
        stock = BeamGroup._answer

        def worse_answer(group: BeamGroup, hypothesis: Any) -> Any:
            answer = stock(group, hypothesis)
            return answer._replace(beam=worse(answer.beam))

        monkeypatch.setattr(BeamGroup, "_answer", worse_answer)
    outcome = run(*BEAMS)
    assert outcome.status == "failed"
    assert "differ by" in outcome.summary


def test_what_is_refused_does_not_apply(run, settings, monkeypatch):
    monkeypatch.setenv("VLLM_TRIE_BEAM", "0")
    outcome = run(*BEAMS)
    assert outcome.status == "not applicable"
    assert "VLLM_TRIE_BEAM=0" in outcome.summary

    outcome = identity.compare_method(settings, "float32", "medusa_dynamic", "tree")
    assert (outcome.status, outcome.summary) == ("not applicable", "no heads: --heads names them")

    shared = identity.start_engine
    monkeypatch.setattr(
        identity,
        "start_engine",
        lambda *arguments, **options: shared(*arguments, **options, kv_sharing_fast_prefill=True),
    )
    outcome = run(*TREES)
    assert outcome.status == "not applicable"
    assert "kv_sharing_fast_prefill is not supported" in outcome.summary


# -- without an engine ----------------------------------------------------------------------------


def test_the_kernel_passes_and_a_cpu_has_no_graphs(settings):
    kernel = kernels.check_attention(settings)
    assert (kernel.status, len(kernel.measured)) == ("passed", 6)
    assert kernels.check_graphs(settings).status == "not applicable"


def test_a_kernel_that_ignores_the_trees(settings, monkeypatch):
    stock = kernels.tree_attention

    def causal(query: Any, cache: Any, table: Any, trees: Any, *rest: Any) -> None:
        seen = trees.word_array | ~trees.word_array
        stock(query, cache, table, dataclasses.replace(trees, word_array=seen), *rest)

    monkeypatch.setattr(kernels, "tree_attention", causal)
    outcome = kernels.check_attention(settings)
    assert outcome.status == "failed"
    assert "wrong for 4 heads" in outcome.summary
    assert len(outcome.details) == 2 + 6


def test_a_kernel_that_raises_and_moves_that_do_not_happen(settings, monkeypatch):
    def fault(*arguments: Any) -> None:
        raise RuntimeError("illegal instruction")

    with monkeypatch.context() as context:
        context.setattr(kernels, "tree_attention", fault)
        outcome = kernels.check_attention(settings)
        assert outcome.status == "failed"
        assert outcome.details[2].count("RuntimeError: illegal instruction") == 1
    monkeypatch.setattr(kernels, "move_slots_in_layers", lambda *arguments: None)
    assert kernels.wrong_moves() == "float32, float16, bfloat16"


def test_replays_with_the_trees_of_the_capture():
    good = {1: [1e-3, 2e-3], 2: [1e-3, 1e-3]}
    assert kernels.graph_outcome(kernels.GRAPH_LAYER, good).status == "passed"
    for wrong in (0.4, float("inf"), float("nan")):
        outcome = kernels.graph_outcome(kernels.GRAPH_LAYER, good | {4: [1e-3, wrong]})
        assert outcome.status == "failed"
        assert "replays are wrong with 4 programs a request" in outcome.summary


def test_a_vllm_that_does_not_fit(settings, monkeypatch):
    monkeypatch.setattr(doctor.ledger, "SUPPORTED_VLLM_VERSIONS", ("0.99",))
    monkeypatch.setenv(doctor.ledger.TRIAL_SWITCH, "0")
    described = doctor.describe(settings)
    assert described.status == "failed"
    assert "is not supported" in described.summary
