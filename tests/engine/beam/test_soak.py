"""Random engines under random load: leaks, wrong KV, wrong results.

Each run is a random engine (pool, block size, slots, token budget, prefix caching, policy,
synchronous or asynchronous scheduling) under a random load of beam and ordinary requests, with
aborts and preemptions. Its worker computes nothing and checks every KV slot: see
`tests/engine/beam/simulation.py`. After a change of the scheduler, let it run for longer:

    BEAM_SOAK_MINUTES=10 python -m pytest tests/engine/beam/test_soak.py
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest

from tests.engine.beam.simulation import Simulation, random_run
from vllm_trie.tiny_model import model_path

MINUTES = float(os.environ.get("BEAM_SOAK_MINUTES", "0.25"))
FIRST_SEED = 1_000
NUM_REQUESTS = 120
STEPS_BETWEEN_CHECKS = 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 * MINUTES + 240)]


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model_path()), dtype="float32", enforce_eager=True, max_model_len=512
    ).create_engine_config()


@pytest.fixture
def checked_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check the scheduler's integrity in every few steps; the list has the number of checks."""
    stock, count = Simulation.step, itertools.count()
    checks = [0]

    def step(self: Simulation) -> None:
        stock(self)
        if next(count) % STEPS_BETWEEN_CHECKS == 0:
            self.scheduler.check_integrity()
            checks[0] += 1

    monkeypatch.setattr(Simulation, "step", step)
    return checks


def test_random_groups_leave_nothing_behind(vllm_config: Any, checked_steps: list[int]) -> None:
    forked = finished = 0
    deadline = time.monotonic() + 60 * MINUTES
    for seed in itertools.count(FIRST_SEED):
        try:
            simulation = random_run(vllm_config, seed, NUM_REQUESTS)
            simulation.scheduler.check_integrity()
        except AssertionError as error:
            error.add_note(f"random_run(vllm_config, {seed}, {NUM_REQUESTS})")
            raise
        finished += len(simulation.finished)
        forked += simulation.scheduler.beam_counters.rows_forked
        if time.monotonic() > deadline:
            break
    assert finished
    assert forked
    assert checked_steps[0]
