"""Drafts leave prompts the tokens of a step that they need, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from vllm_trie.drafts.engine.scheduler.draft_room import cut_drafts

BUDGET = 256
COMPILING = {"status": RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR}


def request(tokens: int, draft: int = 0, **fields: Any) -> Any:
    """A request with some tokens to compute."""
    defaults = {
        "num_tokens": tokens,
        "num_computed_tokens": 0,
        "num_output_placeholders": 0,
        "num_cached": 0,
        "kv_cache_report_mode": "full",
        "spec_token_ids": list(range(draft)),
        "status": RequestStatus.WAITING,
    }
    return SimpleNamespace(**{**defaults, **fields})


def compiled(grammar: object) -> Any:
    return request(200, **COMPILING, structured_output_request=SimpleNamespace(grammar=grammar))


@pytest.mark.parametrize(
    ("waiting", "lengths"),
    [
        ([], [40] * 6),
        ([request(10)], [40] * 6),
        ([request(200)], [8] * 6),
        ([request(250)], [0] * 6),
        ([request(100), request(100)], [8] * 6),
        ([request(220), request(400)], [2] * 6),  # half of what the second one gets without drafts
        ([request(251)], [20] * 6),  # plain vLLM splits it, too
        ([request(1000, num_cached=960)], [35] * 6),
        ([request(200, num_computed_tokens=160)], [35] * 6),  # loaded
        ([request(1000, num_computed_tokens=40, num_cached=960)], [20] * 6),  # no further look-up
        ([request(30)] * 4, [31] * 6),  # two start
        ([request(200, status=RequestStatus.WAITING_FOR_REMOTE_KVS)], [40] * 6),
        ([request(200, status=RequestStatus.PREEMPTED)], [8] * 6),
        ([compiled(None)], [40] * 6),
        ([compiled(object())], [8] * 6),
    ],
)
@pytest.mark.parametrize("num_placeholders", [0, 41])
def test_a_prompt_that_fits_gets_its_tokens(waiting, lengths, num_placeholders):
    running = [
        request(
            120,
            draft=40,
            num_computed_tokens=119 + num_placeholders,
            num_output_placeholders=num_placeholders,
        )
        for _ in range(6)
    ]
    assert drafts_left(running, waiting) == lengths


def test_a_prefill_under_way_gets_its_tokens():
    decoding = [request(120, draft=100, num_computed_tokens=119) for _ in range(2)]
    prefill = request(600, num_computed_tokens=400)
    assert drafts_left([decoding[0], prefill, decoding[1]]) == [27, 0, 27]
    prefill = request(600, num_computed_tokens=200)  # too long for the step without drafts, too
    long_draft = request(120, draft=200, num_computed_tokens=119)
    assert drafts_left([long_draft, prefill]) == [127, 0]


def test_a_prompt_without_memory_takes_no_room():
    running = [request(120, draft=40, num_computed_tokens=119) for _ in range(6)]
    assert drafts_left(running, [request(200)], num_blocks=12) == [40] * 6
    assert drafts_left(running, [request(100), request(100)], num_blocks=12) == [25] * 6
    assert drafts_left(running, [request(200)], num_blocks=13) == [8] * 6


def cached(request: Any) -> tuple[None, int, int]:
    assert request.kv_cache_report_mode != "full", "the blocks are published in each step"
    return None, request.num_cached, 0


def drafts_left(
    running: list[Any], waiting: Sequence[Any] = (), num_blocks: int = 1000
) -> list[int]:
    scheduler: Any = SimpleNamespace(
        running=running,
        waiting=FCFSRequestQueue(one for one in waiting if not one.num_computed_tokens),
        kv_holding_waiting=FCFSRequestQueue(one for one in waiting if one.num_computed_tokens),
        max_num_active_reqs=8,
        max_num_scheduled_tokens=BUDGET,
        block_size=16,
        kv_cache_manager=SimpleNamespace(
            block_pool=SimpleNamespace(get_num_free_blocks=lambda: num_blocks),
            get_computed_blocks=cached,
        ),
    )
    cut_drafts(scheduler)
    return [len(request.spec_token_ids) for request in running]
