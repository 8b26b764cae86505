"""The first measurement of what tokens cost."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from vllm_trie.vllm_hooks.worker.calibration import calibrate_step_cost


class Budget:
    def __init__(self) -> None:
        self.observed: list[int] = []
        self.seconds: list[float] = []

    def expect_step(self, num_tokens: int, seconds: float) -> None:
        assert seconds > 0
        self.observed.append(num_tokens)
        self.seconds.append(seconds)


class Runner:
    """Counts the forward passes, each of which takes `seconds`."""

    max_num_tokens = 200

    def __init__(self, num_ranks: int, seconds: float, budget: Budget | None) -> None:
        self.passes: list[int] = []
        self.seconds = seconds
        self.drafter = SimpleNamespace(node_budget=budget)
        self.parallel_config = SimpleNamespace(world_size_across_dp=num_ranks)
        self.model = SimpleNamespace(compute_logits=lambda hidden_states: hidden_states)

    def _dummy_run(self, num_tokens: int) -> tuple[torch.Tensor, None]:
        self.passes.append(num_tokens)
        return torch.zeros(num_tokens, 1), None

    def _sync_device(self) -> None:
        time.sleep(self.seconds)  # a GPU works while the CPU goes on


def passes(num_ranks: int, seconds: float, limit: float) -> list[int]:
    runner = Runner(num_ranks, seconds, Budget())
    calibrate_step_cost(runner, limit)
    assert len(runner.drafter.node_budget.observed) < len(runner.passes)
    return runner.passes


def test_one_rank_stops_when_it_takes_long() -> None:
    assert len(passes(1, 0.002, limit=1e-6)) < len(passes(1, 0.0, limit=60.0))
    assert 100 < max(passes(1, 0.0, limit=60.0)) <= Runner.max_num_tokens


def test_sizes_that_would_take_long_are_left_out() -> None:
    assert max(passes(1, 0.005, limit=0.05)) < 100


@pytest.mark.parametrize("limit", [1e-6, 60.0])
def test_ranks_do_the_same_whatever_their_clocks_say(limit: float) -> None:
    assert passes(2, 0.0, limit) == passes(2, 0.001, 60.0)


def test_it_waits_for_the_device() -> None:
    budget = Budget()
    calibrate_step_cost(Runner(1, 0.002, budget))
    assert min(budget.seconds) >= 0.002


def test_a_fixed_budget_learns_nothing() -> None:
    runner = Runner(1, 0.0, None)
    calibrate_step_cost(runner)
    assert runner.passes == []
