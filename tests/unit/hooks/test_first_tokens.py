"""Drafts give way to streams that can start, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from vllm_trie.drafts.engine.scheduler import next_drafts
from vllm_trie.drafts.engine.scheduler.next_drafts import GIVING_SHARE, MOST_GIVING, NextDrafts


@pytest.fixture
def steps(monkeypatch):
    """Return a function that counts the drafts left in each of some steps."""
    monkeypatch.setattr(next_drafts.config, "read", lambda _: object())
    monkeypatch.setattr(next_drafts, "loaded", lambda part: ())
    monkeypatch.setattr(next_drafts, "cut_drafts", lambda scheduler: None)

    def steps(
        number: int,
        num_waiting: int,
        places: int = 8,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        is_on_v2: bool = False,
        num_plain: int = 0,
    ) -> list[int]:
        waiting = SimpleNamespace(sampling_params=SamplingParams(output_kind=kind))
        scheduler: Any = SimpleNamespace(
            running=[SimpleNamespace(spec_token_ids=[]) for _ in range(2)],
            waiting=FCFSRequestQueue([waiting] * num_waiting),
            max_num_active_reqs=places,
            use_v2_model_runner=is_on_v2,
            vllm_config=None,
        )
        changes, draft_counts = NextDrafts(scheduler), []
        for step in range(number):
            for request in scheduler.running:
                request.spec_token_ids = [1, 2, 3] if step >= num_plain else []
            changes.change()
            draft_counts.append(sum(len(request.spec_token_ids) for request in scheduler.running))
        return draft_counts

    return steps


def test_drafts_give_way_to_a_stream_that_can_start(steps):
    assert steps(1, num_waiting=1) == [0]
    assert steps(1, num_waiting=0) == [6]
    assert steps(1, num_waiting=1, places=2) == [6]  # it waits for the end of another one
    assert steps(1, num_waiting=1, kind=RequestOutputKind.FINAL_ONLY) == [6]  # no stream


def test_a_search_that_waits_starts_no_stream(steps, monkeypatch):
    monkeypatch.setattr(next_drafts, "InternalRequest", SimpleNamespace)
    assert steps(1, num_waiting=1) == [6]


def test_drafts_stay_in_most_steps_under_load(steps):
    draft_counts = steps(800, num_waiting=1)
    assert draft_counts[: int(MOST_GIVING)] == [0] * int(MOST_GIVING)
    assert draft_counts.count(0) == pytest.approx(MOST_GIVING + 800 * GIVING_SHARE, abs=1)
    assert sum(steps(54, num_waiting=1, num_plain=50)) == 0  # those had none that could give way


def test_drafts_stay_where_the_worker_has_them_already(steps):
    assert steps(1, num_waiting=1, is_on_v2=True) == [6]
