"""What counts as an engine's step."""

from __future__ import annotations

import pytest

from vllm_trie.drafts.engine.step_clock import StepClock


class Now:
    """A clock that tests advance."""

    seconds = 100.0


@pytest.fixture
def now():
    return Now()


def run_step(clock: StepClock, now: Now, inside: float, outside: float, drafting: float) -> float:
    """Return the duration of a step that the engine answers for `outside` seconds before it."""
    now.seconds += outside + drafting
    clock.leave_out(drafting)
    started = now.seconds
    now.seconds += inside
    seconds = clock.stop(started, now.seconds)
    clock.leave(now.seconds)
    return seconds


@pytest.mark.parametrize("drafting", [0.0, 0.5])
def test_time_between_calls_counts_without_drafting(now, drafting):
    clock = StepClock()
    run_step(clock, now, 1.0, 0.0, 0.0)
    steps = [run_step(clock, now, 1.0, 0.2, drafting) for _ in range(200)]
    assert steps[-1] == pytest.approx(1.2, rel=1e-3)
    assert steps == sorted(steps)


def test_an_idle_engine_adds_no_more_than_a_step(now):
    clock = StepClock()
    run_step(clock, now, 1.0, 0.0, 0.0)
    assert run_step(clock, now, 1.0, 3600.0, 0.0) < 1.1
