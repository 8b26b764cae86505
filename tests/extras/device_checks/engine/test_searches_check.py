"""The check at a start passes what works, and finds wrong KV."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from vllm.v1.worker import gpu_model_runner

from tests.engine.beam.cases import greedy_requests
from tests.processes import run_python
from vllm_trie.extras.device_checks import search_check
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.searches import Candidates
from vllm_trie.searches.engine.scheduler import group


@pytest.fixture
def llm(engine):
    return engine(block_size=32, max_model_len=512, max_num_seqs=16)


def at_start(llm: Any) -> str | None:
    """What the check at a start has against an engine that has started."""
    return search_check.reason_against_searches(llm.llm_engine.engine_core.engine_core)


def without_tails(patch: pytest.MonkeyPatch) -> None:
    """Have the worker not copy tail blocks: rows attend to what was there before."""
    patch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", lambda *arguments: None)


def with_rows_of_others(patch: pytest.MonkeyPatch) -> None:
    stock = group._merged

    def rolled(parts):
        rows, *values = stock(parts)[:3]
        return Candidates(rows, *(value[::-1] for value in values))

    patch.setattr(group, "_merged", rolled)


def test_what_works_passes(llm):
    before = scheduler_of(llm).beam_counters.groups
    assert at_start(llm) is None
    assert scheduler_of(llm).beam_counters.groups == before + 5  # 2 and 9 wide, and 3 of 9


def test_log_probabilities_of_another_row_are_found(llm, monkeypatch):
    with_rows_of_others(monkeypatch)
    assert "differ by" in at_start(llm)


def test_a_check_that_sees_nothing_is_found(llm, monkeypatch):
    monkeypatch.setattr(search_check, "_without_copies", nullcontext)
    assert at_start(llm) == "the check does not see missing copies of KV"
    # With random weights it never does; the log says that nothing was checked.
    monkeypatch.setattr(search_check, "has_random_weights", lambda config: True)
    assert at_start(llm) is None


def test_an_engine_whose_searches_raise_goes_on(llm, monkeypatch):
    texts, params = zip(*greedy_requests(2, max_tokens=5), strict=True)
    expected = llm.generate(list(texts), list(params), use_tqdm=False)

    def fault(*arguments: Any) -> None:
        raise RuntimeError("a fault of the device")

    monkeypatch.setattr(gpu_model_runner, "copy_kv_cache_blocks_inplace", fault)
    assert at_start(llm) == "RuntimeError: a fault of the device"
    results = llm.generate(list(texts), list(params), use_tqdm=False)
    assert [r.outputs[0].token_ids for r in results] == [r.outputs[0].token_ids for r in expected]


@pytest.mark.slow
def test_a_refusal_reaches_a_front_end_of_its_own_process():
    program = "-m", "tests.extras.device_checks.engine.search_check_run"
    done = run_python(*program, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert "checked 2 starts" in done.stdout, done.stderr[-3000:]
