"""The first measurement of what tokens cost."""

from __future__ import annotations

import time
from itertools import count

import pytest

from vllm_trie.drafts.engine.start.calibration import calibrate_step_cost

MAX_NUM_TOKENS = 200


class Budget:
    def __init__(self) -> None:
        self.observed: list[int] = []
        self.seconds: list[float] = []

    def expect_step(self, num_tokens: int, seconds: float) -> None:
        assert seconds > 0
        self.observed.append(num_tokens)
        self.seconds.append(seconds)


def passes(num_ranks: int, seconds: float, limit: float, budget: Budget | None = None) -> list[int]:
    """The sizes of the forward passes, each of which takes `seconds`."""
    sizes = []

    def run_step(num_tokens: int) -> None:
        sizes.append(num_tokens)
        time.sleep(seconds)

    budget = budget or Budget()
    calibrate_step_cost(budget, run_step, MAX_NUM_TOKENS, num_ranks, limit)
    assert sorted(budget.observed) == sorted(set(sizes))
    return sizes


def test_one_rank_stops_when_it_takes_long():
    assert len(passes(1, 0.002, limit=1e-6)) < len(passes(1, 0.0, limit=60.0))
    assert 100 < max(passes(1, 0.0, limit=60.0)) <= MAX_NUM_TOKENS


def test_sizes_that_would_take_long_are_left_out():
    budget = Budget()
    assert max(passes(1, 0.005, 0.05, budget)) < 100
    assert min(budget.seconds) >= 0.005  # the whole pass


@pytest.mark.parametrize("limit", [1e-6, 60.0])
def test_ranks_do_the_same_whatever_their_clocks_say(limit):
    assert passes(2, 0.0, limit) == passes(2, 0.001, 60.0)


def test_the_shortest_pass_of_a_size_counts():
    """Something else keeps the machine busy during the first passes, then during a late one."""
    for slow in (range(15), range(20, 21)):
        budget = Budget()
        durations = (0.02 if i in slow else 0.0 for i in count())
        calibrate_step_cost(budget, lambda n, d=durations: time.sleep(next(d)), MAX_NUM_TOKENS, 1)
        assert max(budget.seconds) < 0.02


def test_the_passes_have_a_clock_of_their_own():
    ticks, budget = count(), Budget()
    calibrate_step_cost(
        budget, lambda n: time.sleep(0.001), MAX_NUM_TOKENS, 1, clock=lambda: next(ticks)
    )
    assert set(budget.seconds) == {1}


def test_a_fixed_budget_learns_nothing():
    calibrate_step_cost(None, lambda num_tokens: pytest.fail("a pass"), MAX_NUM_TOKENS, 1)
