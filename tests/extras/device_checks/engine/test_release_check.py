"""A release of vLLM that is not listed: the installed one, with others in the list.

Its check passes what works, and finds symbols that mean something else. The engine serves on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.engine.beam.cases import greedy_requests
from tests.engine.compare import accepted_tokens, differences, generate, speculation
from tests.extras.device_checks.engine.test_searches_check import without_tails
from tests.newer_vllm import newer_vllm
from tests.processes import run_python
from tests.unit.lab.test_other_vllm import assert_the_same
from vllm_trie.drafts.engine.runners.v1 import V1Speculation
from vllm_trie.drafts.engine.verification import compaction
from vllm_trie.extras.device_checks import engine_steps, release_check, search_check
from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger import table
from vllm_trie.hooks.start.limits import switch_off
from vllm_trie.lab.local_engine import scheduler_of, verifier_of
from vllm_trie.searches.engine.scheduler.beam_scheduler import TrieBeamScheduler

Patch = pytest.MonkeyPatch
ROOM = {"block_size": 32, "max_model_len": 512}
TREES = {**ROOM, **speculation("ngram_trie", 8)}
CHAINS = {**ROOM, **speculation("ngram_trie", 8, verification="chain")}


@pytest.fixture(autouse=True)
def _unlisted(monkeypatch, plugin_log):
    monkeypatch.setattr(table, "SUPPORTED_VLLM_VERSIONS", ("0.31",))


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def outputs(llm: Any) -> list[Any]:
    texts, params = zip(*greedy_requests(3, max_tokens=12), strict=True)
    return generate(llm, list(texts), list(params))


@pytest.mark.parametrize("options", [TREES, CHAINS], ids=["trees", "chains"])
def test_an_engine_that_passes(engine, caplog, options):
    llm = engine(**options)
    assert "none of the releases" in caplog.text
    assert "Its hooks fit, and drafts passed their check" in caplog.text
    assert "Native beam search passed its check" in caplog.text
    assert verifier_of(llm).guard.drafter.name == "ngram_trie"
    assert accepted_tokens(llm) == 0  # those of the check are forgotten
    assert differences(outputs(engine(**ROOM)), outputs(llm)) == []
    assert accepted_tokens(llm) > 0


# -- what is found ---------------------------------------------------------------------------------


def kv_that_stays(patch: Patch) -> None:
    patch.setattr(compaction, "compact", lambda *arguments: None)


def rows_of_others(patch: Patch) -> None:
    stock = V1Speculation._verify

    def verify(self: Any, step: Any, logits: torch.Tensor) -> Any:
        return stock(self, step, logits.roll(1, 0) if step.has_drafts else logits)

    patch.setattr(V1Speculation, "_verify", verify)


def shifted_masks(patch: Patch) -> None:
    stock = Scheduler.get_grammar_bitmask

    def get_grammar_bitmask(self: Any, scheduled: Any) -> Any:
        grammar = stock(self, scheduled)
        if grammar is not None and scheduled.scheduled_spec_decode_tokens:
            masks = grammar.grammar_bitmask
            grammar.grammar_bitmask = masks[[*range(1, len(masks)), 0]]
        return grammar

    patch.setattr(Scheduler, "get_grammar_bitmask", get_grammar_bitmask)


def a_call_that_raises(patch: Patch) -> None:
    stock = GPUModelRunner._prepare_inputs

    def prepare_inputs(self: Any, scheduled: Any, *rest: Any) -> Any:
        if scheduled.scheduled_spec_decode_tokens:
            raise RuntimeError("another meaning")
        return stock(self, scheduled, *rest)

    patch.setattr(GPUModelRunner, "_prepare_inputs", prepare_inputs)


def drafts_that_are_lost(patch: Patch) -> None:
    patch.setattr(Scheduler, "update_draft_token_ids", lambda self, drafts: None)


@pytest.mark.parametrize(
    ("options", "fault", "said"),
    [
        (TREES, kv_that_stays, "of a test prompt is"),
        (TREES, rows_of_others, "a request failed"),  # that with a grammar
        (TREES, a_call_that_raises, "RuntimeError: another meaning"),
        (CHAINS, shifted_masks, "a request failed"),
        (CHAINS, drafts_that_are_lost, "were not accepted"),
    ],
)
def test_an_engine_serves_without_drafts_that_fail(
    engine, monkeypatch, caplog, options, fault: Callable[[Patch], None], said
):
    llm = engine(**options)
    guard = verifier_of(llm).guard
    monkeypatch.setattr(guard, "_rests_until", 0.0)  # and again at the end
    with monkeypatch.context() as patch:
        fault(patch)
        release_check.check_release(core_of(llm))
    assert guard.is_off
    [line] = [r.getMessage() for r in caplog.records if "serves without drafts" in r.getMessage()]
    assert said in line
    assert differences(outputs(engine(**ROOM)), outputs(llm)) == []
    totals = verifier_of(llm).totals
    assert totals.tokens == totals.steps > 0
    assert totals.draft_failures == {"start_check": 1}
    assert not guard._unreleased
    assert scheduler_of(llm).beam_off is None


def test_an_engine_serves_without_searches_that_fail(engine, monkeypatch):
    llm = engine(**TREES)
    with monkeypatch.context() as patch:
        without_tails(patch)
        search_check.engine_core_init(lambda core: None, core_of(llm))
    assert "differ by" in scheduler_of(llm).beam_off
    assert isinstance(scheduler_of(llm), TrieBeamScheduler)
    assert differences(outputs(engine(**ROOM)), outputs(llm)) == []
    assert not verifier_of(llm).guard.is_off
    switch_off(core_of(llm).vllm_config, None)


def a_scheduler_that_raises(patch: Patch) -> None:
    def schedule(self: Any, throttle_prefills: bool = False) -> None:
        raise RuntimeError("another meaning")

    patch.setattr(TrieBeamScheduler, "schedule", schedule)


def test_an_engine_that_decodes_with_no_hooks_does_not_start_with_drafts(engine, monkeypatch):
    llm = engine(**TREES)
    with monkeypatch.context() as patch:
        a_scheduler_that_raises(patch)
        with pytest.raises(RuntimeError, match=r"without drafts fail: .*another meaning"):
            release_check.check_release(core_of(llm))
    engine_steps.drop_requests(core_of(llm))


def test_without_drafts_it_serves_without_the_plugin(engine, monkeypatch, caplog):
    llm = engine(**ROOM)
    expected = outputs(llm)
    ours = type(scheduler_of(llm))
    with monkeypatch.context() as patch:
        a_scheduler_that_raises(patch)
        release_check.check_release(core_of(llm))
        assert type(scheduler_of(llm)) in (Scheduler, AsyncScheduler)
        assert ledger.patches_in_place() == ()
        assert "vllm-trie steps aside" in caplog.text
        assert differences(expected, outputs(llm)) == []
    for feature in ("speculation", "beam"):
        ledger.install(feature)
    scheduler_of(llm).__class__ = ours
    switch_off(core_of(llm).vllm_config, None)


# -- whole processes -------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_newer_vllm_where_it_is_not_listed():
    """Engines in processes of their own."""
    program = "tests.extras.device_checks.engine.release_check_run"
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
    variables["VLLM_LOGGING_LEVEL"] = "INFO"  # other tests of this process lower it
    done = run_python("-m", program, **variables, **newer_vllm())
    for passed in ("requests without drafts", "drafts"):
        assert f"Its hooks fit, and {passed} passed their check" in done.stdout
    assert done.stdout.count("Native beam search passed its check") == 2
    result = json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])
    assert result["status"] == {"speculation": "ok", "beam": "ok"}
    assert result["differences"] == []
    assert result["accepted"] > 0
    assert result["off"] == [None, None]
    assert_the_same(result["read"])
