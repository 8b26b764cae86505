"""Parts that bring nothing rest, and come back when they pay; trials cost little."""

from __future__ import annotations

import random

import pytest

from vllm_trie.drafters.union.hindsight import Judgement, Worth
from vllm_trie.drafters.union.record import LAST_WAIT, SHARED_STEPS, SharedRecord
from vllm_trie.drafters.union.roster import TRIAL_STEPS, Roster

WINDOW_COST = 2


class Text:
    """What the parts would be worth in each step, and what the roster makes of it."""

    def __init__(self, shared: SharedRecord, gross: list[float], cost: list[float]) -> None:
        self.roster = Roster(shared)
        self.gross, self.cost = gross, cost
        self.drafted: list[list[int]] = []
        self._rng = random.Random(0)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            drafting = self.roster.next_step()
            self.drafted.append(drafting)
            worth = {
                part: Worth(self._draw(gross) if part in drafting else None, self._draw(cost))
                for part, (gross, cost) in enumerate(zip(self.gross, self.cost, strict=True))
            }
            self.roster.record(Judgement(4, worth))

    def _draw(self, mean: float) -> int:
        whole, rest = divmod(mean, 1.0)
        return int(whole) + (self._rng.random() < rest)

    def share(self, part: int, last: int) -> float:
        """How often a part drafted in the last steps."""
        return sum(part in drafting for drafting in self.drafted[-last:]) / last


def test_parts_that_pay_stay() -> None:
    text = Text(SharedRecord([False, False]), [1.0, 0.5], [0, 0])
    text.step(2000)
    assert all(drafting == [0, 1] for drafting in text.drafted)


def test_a_part_that_brings_nothing_is_starved_but_tried() -> None:
    text = Text(SharedRecord([False, False]), [1.0, 0.0], [0, 0])
    text.step(4000)
    assert text.drafted[0] == [0, 1]
    assert 0 < text.share(1, 1000) < 0.1
    assert text.share(0, 4000) == 1


def test_a_starved_part_comes_back_when_it_pays() -> None:
    text = Text(SharedRecord([False, False]), [1.0, 0.0], [0, 0])
    text.step(3000)
    text.gross[1] = 0.6
    text.step(LAST_WAIT + 2 * TRIAL_STEPS)
    text.step(200)
    assert text.share(1, 200) == 1
    assert text.roster.shared.returns[1] == 1


def test_one_part_always_stays() -> None:
    text = Text(SharedRecord([False, False, False]), [0.0, 0.0, 0.0], [0, 0, 0])
    text.step(3000)
    assert all(text.drafted)
    assert text.drafted.count([0]) > 2000


def test_what_one_request_shows_holds_for_the_next() -> None:
    shared = SharedRecord([False, False])
    first = Text(shared, [1.0, 0.0], [0, 0])
    first.step(4000)
    first.roster.end()
    second = Text(shared, [1.0, 0.0], [0, 0])
    second.step(1)
    assert 1 not in shared.active or not shared.active[1]
    assert second.drafted[0] in ([0], [0, 1])  # at most a trial
    assert not second.roster.active[1]


def test_a_request_can_differ_from_the_others() -> None:
    """A part that pays elsewhere leaves a request that it brings nothing, and only that one."""
    shared = SharedRecord([False, False])
    Text(shared, [1.0, 0.8], [0, 0]).step(1000)
    odd = Text(shared, [1.0, 0.0], [0, 0])
    odd.step(SHARED_STEPS * 3)
    assert not odd.roster.active[1] or odd.share(1, 100) < 1
    assert Roster(SharedRecord([False, False])).active == [True, True]


@pytest.mark.parametrize("cost", [0.5, 3.0, 8.0])
def test_a_window_that_does_not_pay_costs_little(cost: float) -> None:
    text = Text(SharedRecord([False, True]), [1.0, 0.1], [0, cost])
    text.step(20_000)
    lost = sum(1 in drafting for drafting in text.drafted) * cost
    assert text.drafted[0] == [0]
    assert lost < 0.004 * 4 * 20_000


def test_a_window_that_pays_is_found() -> None:
    text = Text(SharedRecord([False, True]), [1.0, 0.8], [0, 0.1])
    text.step(6000)
    assert text.share(1, 1000) == 1


def test_a_window_that_stops_paying_leaves() -> None:
    text = Text(SharedRecord([False, True]), [1.0, 0.8], [0, 0.1])
    text.step(6000)
    text.cost[1] = 3.0
    text.step(500)
    assert text.share(1, 100) < 0.5


def test_a_trial_that_costs_too_much_ends_early() -> None:
    text = Text(SharedRecord([False, True]), [1.0, 0.0], [0, 0.1])
    while 1 not in (text.drafted[-1] if text.drafted else []):
        text.step()
        assert len(text.drafted) < 20_000
    text.cost[1] = 5.0
    text.step(TRIAL_STEPS)
    assert sum(1 in drafting for drafting in text.drafted) < TRIAL_STEPS // 2


def test_a_trial_that_its_request_does_not_finish_goes_to_another() -> None:
    shared = SharedRecord([False, False])
    shared.active[1] = False
    shared.rested[1] = shared.wait[1]
    allowance = list(shared.allowance)
    first = Text(shared, [1.0, 0.5], [0, 0])
    first.step(3)
    assert first.share(1, 3) == 1
    first.roster.end()
    assert shared.rested[1] == shared.wait[1]
    assert shared.allowance[1] >= allowance[1]
    second = Text(shared, [1.0, 0.5], [0, 0])
    second.step(200)
    assert second.drafted[0] == [0, 1]
    assert second.share(1, 50) == 1


def test_if_all_parts_have_windows_the_first_drafts() -> None:
    text = Text(SharedRecord([True, True]), [1.0, 0.0], [0.0, 0.5])
    text.step(10)
    assert all(0 in drafting for drafting in text.drafted)
