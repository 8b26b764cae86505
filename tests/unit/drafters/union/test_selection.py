"""Parts without a gain are suspended and reinstated when they have one; trials cost little."""

from __future__ import annotations

import random

import pytest

from vllm_trie.drafters.union.evaluation import PartEvaluation
from vllm_trie.drafters.union.selection import RESTS, TRIAL_STEPS, PartSelection


class Text:
    """The gain and cost of each part in each step of a request, and the parts that draft."""

    def __init__(
        self,
        selection: PartSelection,
        gain: list[float],
        cost: list[float],
        request_id: str = "a",
    ) -> None:
        self.selection, self.request_id = selection, request_id
        self.gain, self.cost = gain, cost
        self.drafted: list[list[int]] = []
        self._rng = random.Random(0)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            drafting = self.selection.drafting(self.request_id)
            self.drafted.append(drafting)
            evaluation = {
                part: PartEvaluation(self._draw(self.gain[part]), self._draw(self.cost[part]))
                for part in drafting
            }
            self.selection.learn(self.request_id, evaluation)

    def _draw(self, mean: float) -> int:
        whole, rest = divmod(mean, 1.0)
        return int(whole) + (self._rng.random() < rest)

    def share(self, part: int, last: int) -> float:
        """How often a part drafted in the last steps."""
        return sum(part in drafting for drafting in self.drafted[-last:]) / last


def select(*has_window: bool) -> PartSelection:
    return PartSelection(dict(enumerate(has_window)))


def test_parts_with_a_gain_stay() -> None:
    text = Text(select(False, False), [1.0, 0.5], [0, 0])
    text.step(2000)
    assert all(drafting == [0, 1] for drafting in text.drafted)


def test_a_part_without_a_gain_is_suspended_but_tried() -> None:
    text = Text(select(False, False), [1.0, 0.0], [0, 0])
    text.step(4000)
    assert text.drafted[0] == [0, 1]
    assert 0 < text.share(1, 1000) < 0.1
    assert text.share(0, 4000) == 1


def test_a_suspended_part_is_reinstated_when_it_has_a_gain() -> None:
    text = Text(select(False, False), [1.0, 0.0], [0, 0])
    text.step(3000)
    text.gain[1] = 0.6
    text.step(RESTS[1] + 2 * TRIAL_STEPS)
    text.step(200)
    assert text.share(1, 200) == 1


def test_one_part_always_stays() -> None:
    text = Text(select(False, False, False), [0.0, 0.0, 0.0], [0, 0, 0])
    text.step(3000)
    assert all(text.drafted)
    assert text.drafted.count([0]) > 2000


def test_what_one_request_shows_holds_for_the_next() -> None:
    selection = select(False, False)
    Text(selection, [1.0, 0.0], [0, 0]).step(4000)
    selection.end("a")
    second = Text(selection, [1.0, 0.0], [0, 0], "b")
    second.step(1)
    assert second.drafted[0] in ([0], [0, 1])  # at most a trial
    assert selection.active == [0]


def test_of_two_parts_that_propose_the_same_one_stays() -> None:
    """Neither has a gain next to the other, and the first one has all of it alone."""
    text = Text(select(False, False), [0.0, 0.0], [0, 0])
    while len(text.selection.active) == 2:
        text.step()
    text.gain[0] = 1.0
    text.step(2000)
    assert text.share(0, 2000) == 1


@pytest.mark.parametrize("cost", [0.5, 3.0, 8.0])
def test_a_window_that_does_not_pay_costs_little(cost: float) -> None:
    text = Text(select(False, True), [1.0, 0.1], [0, cost])
    text.step(20_000)
    lost = sum(1 in drafting for drafting in text.drafted) * cost
    assert text.drafted[0] == [0]
    assert lost < 0.004 * 4 * 20_000


def test_a_window_that_pays_is_found() -> None:
    text = Text(select(False, True), [1.0, 0.8], [0, 0.1])
    text.step(6000)
    assert text.share(1, 1000) == 1


def test_a_window_that_stops_paying_leaves() -> None:
    text = Text(select(False, True), [1.0, 0.8], [0, 0.1])
    text.step(6000)
    text.cost[1] = 3.0
    text.step(500)
    assert text.share(1, 100) < 0.5


def test_a_trial_that_costs_too_much_ends_early() -> None:
    text = Text(select(False, True), [1.0, 0.0], [0, 5.0])
    while 1 not in (text.drafted[-1] if text.drafted else []):
        text.step()
        assert len(text.drafted) < 20_000
    text.step(TRIAL_STEPS)
    assert sum(1 in drafting for drafting in text.drafted) < TRIAL_STEPS // 2


def test_a_trial_that_its_request_does_not_finish_goes_to_another() -> None:
    selection = select(False, True)
    first = Text(selection, [1.0, 0.5], [0, 0])
    while 1 not in (first.drafted[-1] if first.drafted else []):
        first.step()
    other = Text(selection, [1.0, 0.5], [0, 0], "b")
    other.step(3)
    assert other.share(1, 3) == 0  # a part may have to warm up in one request
    selection.end("a")
    other.step(200)
    assert other.drafted[3] == [0, 1]
    assert other.share(1, 50) == 1


def test_if_all_parts_have_windows_the_first_drafts() -> None:
    text = Text(select(True, True), [1.0, 0.0], [0.0, 0.5])
    text.step(10)
    assert all(0 in drafting for drafting in text.drafted)
