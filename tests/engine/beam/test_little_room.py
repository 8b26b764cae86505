"""Searches with hardly any room: slots, tokens per step, length, blocks. Always the oracle's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.beam.cases import (
    check_case,
    greedy_requests,
    prompt,
    request_of,
    run_cases,
    run_mixed,
)
from tests.engine.beam.oracle import Case
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

SHIPPED = str(model_path())


def cases(widths: tuple[int, ...], length: int = 20, max_tokens: int = 10) -> list[Case]:
    return [
        Case(prompt(number, length + number), width, early_stopping, 1.0, max_tokens)
        for number, (width, early_stopping) in enumerate(
            (width, early_stopping) for width in widths for early_stopping in (False, "never")
        )
    ]


@pytest.mark.parametrize("asked", [16, 4])
@pytest.mark.parametrize("width", [1, 4])
def test_a_step_of_as_many_tokens_as_rows(engine, width, asked):
    """Every prompt comes in chunks next to rows that decode."""
    llm = engine(max_num_seqs=4, max_num_batched_tokens=asked, block_size=32, max_model_len=128)
    run_mixed(llm, SHIPPED, cases((width,), length=50), greedy_requests(3, max_tokens=12))


@pytest.mark.parametrize("slots", [1, 3])
def test_all_slots_for_one_search(engine, slots):
    llm = engine(max_num_seqs=slots, block_size=32, max_model_len=128)
    run_mixed(llm, SHIPPED, cases((slots, 1)), greedy_requests(3, max_tokens=12))
    text, params = request_of(Case(prompt(1, 20), slots + 1))
    with pytest.raises(ValueError, match=f"beam_width must be at most max_num_seqs={slots}"):
        llm.generate([text], params, use_tqdm=False)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_few_tokens_to_the_end_of_the_model(engine, length):
    """``max_model_len`` ends the search, as ``max_tokens`` does."""
    llm = engine(max_num_seqs=8, block_size=32, max_model_len=6)
    for width in (1, 2, 7):
        asked = Case(prompt(width, length), width, max_tokens=6 - length)
        text, params = request_of(asked)
        params.max_tokens = None if width == 2 else 100
        (result,) = llm.generate([text], params, use_tqdm=False)
        check_case(SHIPPED, asked, result)
        assert {len(output.token_ids) for output in result.outputs} <= set(range(1, 7 - length))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_no_more_blocks_than_the_search_needs(engine, prefix_caching):
    """One block for each row behind the full ones: groups take turns, nothing hangs."""
    llm = engine(
        max_num_seqs=8,
        block_size=32,
        max_model_len=96,
        num_gpu_blocks_override=1 + 2 + 4,
        enable_prefix_caching=prefix_caching,
    )
    counters = scheduler_of(llm).beam_counters
    before = counters.beams_recomputed
    run_cases(llm, SHIPPED, cases((4, 3), length=60, max_tokens=12))
    assert counters.beams_recomputed > before


@pytest.mark.parametrize("block_size", [32, 128])
def test_many_groups_at_once(engine, block_size):
    llm = engine(max_num_seqs=12, block_size=block_size, max_model_len=128)
    many = [case for _ in range(3) for case in cases((1, 2, 5, 12), length=10, max_tokens=8)]
    run_mixed(llm, SHIPPED, many, greedy_requests(20, max_tokens=9))


def test_every_search_of_a_full_queue_can_be_aborted(engine):
    llm = engine(max_num_seqs=4, block_size=32, max_model_len=128)
    scheduler: Any = scheduler_of(llm)
    core = llm.llm_engine
    text, params = request_of(Case(prompt(1, 20), 4, max_tokens=50))
    for round_ in range(4):
        for number in range(6):
            core.add_request(f"{round_} {number}", text, params)
        for _ in range(round_ * 2):
            core.step()
        core.abort_request([f"{round_} {number}" for number in range(6)])
        for _ in range(3):
            if scheduler.has_requests():
                core.step()
        assert not core.has_unfinished_requests()
        assert not scheduler.requests
        assert scheduler.beam_groups.idle
    run_cases(llm, SHIPPED, cases((4,)))
