"""Random engines under random load: leaks, wrong KV, wrong results.

Each run is a random engine (pool, block size, slots, token budget, prefix caching, policy,
synchronous or asynchronous scheduling) under a random load of beam and ordinary requests, with
aborts and preemptions. Its worker computes nothing and checks every KV slot: see
`tests/engine/beam/simulation.py`. After a change of the scheduler, let it run for longer:

    BEAM_SOAK_MINUTES=10 python -m pytest tests/engine/beam/test_soak.py
"""

import itertools
import os
import time

import pytest

from tests.engine.beam.simulation import random_run

MINUTES = float(os.environ.get("BEAM_SOAK_MINUTES", "0"))
NUM_SEEDS = 16
NUM_REQUESTS = 120


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_groups_leave_nothing_behind(vllm_config, seed):
    simulation = random_run(vllm_config, seed, NUM_REQUESTS)
    assert simulation.finished
    assert simulation.scheduler.beam_counters.beams_forked


@pytest.mark.slow
@pytest.mark.skipif(not MINUTES, reason="BEAM_SOAK_MINUTES is not set")
@pytest.mark.timeout(60 * MINUTES + 240)
def test_further_seeds(vllm_config):
    deadline = time.monotonic() + 60 * MINUTES
    for seed in itertools.count(NUM_SEEDS):
        try:
            random_run(vllm_config, seed, NUM_REQUESTS)
        except AssertionError as error:
            error.add_note(f"random_run(vllm_config, {seed}, {NUM_REQUESTS})")
            raise
        if time.monotonic() > deadline:
            break
