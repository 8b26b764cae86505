"""Random beam and ordinary requests with aborts in a real engine whose pool is too small."""

from __future__ import annotations

import pytest

from tests.engine.beam.cases import greedy_requests, run_with_aborts
from tests.engine.compare import step_to_the_end
from vllm_trie.lab.local_engine import scheduler_of


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_random_load_with_aborts(engine, eos_heavy_model, prefix_caching):
    path = str(eos_heavy_model)
    llm = engine(
        model=path,
        block_size=32,
        max_model_len=160,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=9,
        enable_prefix_caching=prefix_caching,
    )
    scheduler = scheduler_of(llm)
    preempted = scheduler.beam_counters.beams_preempted
    assert run_with_aborts(llm, path, 32, greedy_requests(15), fewer=True) > 30
    assert scheduler.beam_counters.beams_preempted > preempted
    step_to_the_end(llm)
    assert not scheduler.requests
    assert not scheduler.beam_groups.by_id
