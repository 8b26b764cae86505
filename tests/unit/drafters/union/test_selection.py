"""Parts without a gain are suspended and reinstated when they have one; trials cost little."""

from __future__ import annotations

import random

import pytest

from vllm_trie.drafters.union.evaluation import PartEvaluation, StepEvaluation
from vllm_trie.drafters.union.selection import TRIAL_STEPS, PartSelection
from vllm_trie.drafters.union.statistics import (
    MAX_TRIAL_INTERVAL,
    SHARED_STEPS,
    SharedStatistics,
)


class Text:
    """The gain and cost of each part in each step, and the parts that are selected for it."""

    def __init__(self, shared: SharedStatistics, gain: list[float], cost: list[float]) -> None:
        self.selection = PartSelection(shared)
        self.gain, self.cost = gain, cost
        self.drafted: list[list[int]] = []
        self._rng = random.Random(0)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            drafting = self.selection.next_step()
            self.drafted.append(drafting)
            parts = {
                part: PartEvaluation(
                    self._draw(gain) if part in drafting else None, self._draw(cost)
                )
                for part, (gain, cost) in enumerate(zip(self.gain, self.cost, strict=True))
            }
            self.selection.update(StepEvaluation(4, parts))

    def _draw(self, mean: float) -> int:
        whole, rest = divmod(mean, 1.0)
        return int(whole) + (self._rng.random() < rest)

    def share(self, part: int, last: int) -> float:
        """How often a part drafted in the last steps."""
        return sum(part in drafting for drafting in self.drafted[-last:]) / last


def test_parts_with_a_gain_stay() -> None:
    text = Text(SharedStatistics([0.0, 0.0]), [1.0, 0.5], [0, 0])
    text.step(2000)
    assert all(drafting == [0, 1] for drafting in text.drafted)


def test_a_part_without_a_gain_is_suspended_but_tried() -> None:
    text = Text(SharedStatistics([0.0, 0.0]), [1.0, 0.0], [0, 0])
    text.step(4000)
    assert text.drafted[0] == [0, 1]
    assert 0 < text.share(1, 1000) < 0.1
    assert text.share(0, 4000) == 1


def test_a_suspended_part_is_reinstated_when_it_has_a_gain() -> None:
    text = Text(SharedStatistics([0.0, 0.0]), [1.0, 0.0], [0, 0])
    text.step(3000)
    text.gain[1] = 0.6
    text.step(MAX_TRIAL_INTERVAL + 2 * TRIAL_STEPS)
    text.step(200)
    assert text.share(1, 200) == 1
    assert text.selection.shared.parts[1].num_reinstated == 1


def test_one_part_always_stays() -> None:
    text = Text(SharedStatistics([0.0, 0.0, 0.0]), [0.0, 0.0, 0.0], [0, 0, 0])
    text.step(3000)
    assert all(text.drafted)
    assert text.drafted.count([0]) > 2000


def test_statistics_of_one_request_hold_for_the_next() -> None:
    shared = SharedStatistics([0.0, 0.0])
    first = Text(shared, [1.0, 0.0], [0, 0])
    first.step(4000)
    first.selection.end()
    second = Text(shared, [1.0, 0.0], [0, 0])
    second.step(1)
    assert not shared.parts[1].active
    assert second.drafted[0] in ([0], [0, 1])  # at most a trial
    assert 1 not in second.selection.active


def test_a_request_can_differ_from_the_others() -> None:
    """A part is suspended in the only request in which it has no gain."""
    shared = SharedStatistics([0.0, 0.0])
    Text(shared, [1.0, 0.8], [0, 0]).step(1000)
    odd = Text(shared, [1.0, 0.0], [0, 0])
    odd.step(SHARED_STEPS * 3)
    assert 1 not in odd.selection.active or odd.share(1, 100) < 1
    assert PartSelection(SharedStatistics([0.0, 0.0])).active == [0, 1]


@pytest.mark.parametrize("cost", [0.5, 3.0, 8.0])
def test_a_window_that_does_not_pay_costs_little(cost: float) -> None:
    text = Text(SharedStatistics([0.0, 1.0]), [1.0, 0.1], [0, cost])
    text.step(20_000)
    lost = sum(1 in drafting for drafting in text.drafted) * cost
    assert text.drafted[0] == [0]
    assert lost < 0.004 * 4 * 20_000


def test_a_window_that_pays_is_found() -> None:
    text = Text(SharedStatistics([0.0, 1.0]), [1.0, 0.8], [0, 0.1])
    text.step(6000)
    assert text.share(1, 1000) == 1


def test_a_window_that_stops_paying_leaves() -> None:
    text = Text(SharedStatistics([0.0, 1.0]), [1.0, 0.8], [0, 0.1])
    text.step(6000)
    text.cost[1] = 3.0
    text.step(500)
    assert text.share(1, 100) < 0.5


def test_a_trial_that_costs_too_much_ends_early() -> None:
    text = Text(SharedStatistics([0.0, 1.0]), [1.0, 0.0], [0, 0.1])
    while 1 not in (text.drafted[-1] if text.drafted else []):
        text.step()
        assert len(text.drafted) < 20_000
    text.cost[1] = 5.0
    text.step(TRIAL_STEPS)
    assert sum(1 in drafting for drafting in text.drafted) < TRIAL_STEPS // 2


def test_a_trial_that_its_request_does_not_finish_goes_to_another() -> None:
    shared = SharedStatistics([0.0, 0.0])
    part = shared.parts[1]
    part.active = False
    part.suspended_steps = part.trial_interval
    budget = part.trial_budget
    first = Text(shared, [1.0, 0.5], [0, 0])
    first.step(3)
    assert first.share(1, 3) == 1
    first.selection.end()
    assert part.suspended_steps == part.trial_interval
    assert part.trial_budget >= budget
    second = Text(shared, [1.0, 0.5], [0, 0])
    second.step(200)
    assert second.drafted[0] == [0, 1]
    assert second.share(1, 50) == 1


def test_if_all_parts_have_windows_the_first_drafts() -> None:
    text = Text(SharedStatistics([1.0, 1.0]), [1.0, 0.0], [0.0, 0.5])
    text.step(10)
    assert all(0 in drafting for drafting in text.drafted)
