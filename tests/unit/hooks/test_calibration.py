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
        self.cost = self

    def expect(self, num_tokens: int, seconds: float) -> None:
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


class Clock:
    """Passes of one millisecond and one for each block of 16 tokens, on a machine that is slower at
    times: `slow` are the numbers of these passes."""

    def __init__(self, slow: range) -> None:
        self._slow = slow
        self._passes = count()
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def run_step(self, num_tokens: int) -> None:
        factor = 1.7 if next(self._passes) in self._slow else 1.0
        self._now += 1e-3 * factor * (1.0 + -(-num_tokens // 16))


@pytest.mark.parametrize("slow", [range(15), range(20, 21), range(18, 42), range(200)])
def test_busy_spells_do_not_change_the_proportions(slow):
    """The first passes, one of them, a round and some passes of others, and all."""
    budget, clock = Budget(), Clock(slow)
    calibrate_step_cost(budget, clock.run_step, MAX_NUM_TOKENS, 1, clock=clock)
    took = dict(zip(budget.observed, budget.seconds, strict=True))
    for num_tokens, blocks in ((16, 1), (17, 2), (65, 5), (129, 9)):
        assert took[num_tokens] / took[1] == pytest.approx((1 + blocks) / 2, rel=1e-6)


def test_the_passes_have_a_clock_of_their_own():
    ticks, budget = count(), Budget()
    calibrate_step_cost(
        budget, lambda n: time.sleep(0.001), MAX_NUM_TOKENS, 1, clock=lambda: next(ticks)
    )
    assert set(budget.seconds) == {1}


def test_a_fixed_budget_learns_nothing():
    calibrate_step_cost(None, lambda num_tokens: pytest.fail("a pass"), MAX_NUM_TOKENS, 1)
