"""Parts without a gain are suspended and reinstated when they have one."""

from __future__ import annotations

import random

from vllm_trie.drafters.union.selection import RESTS, TRIAL_STEPS, PartSelection


class Text:
    """The gain of each part in each step of a request, and the parts that draft."""

    def __init__(self, selection: PartSelection, gain: list[float], request_id: str = "a") -> None:
        self.selection, self.request_id = selection, request_id
        self.gain = gain
        self.drafted: list[list[int]] = []
        self._rng = random.Random(0)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            drafting = self.selection.drafting(self.request_id)
            self.drafted.append(drafting)
            gains = {part: self._draw(self.gain[part]) for part in drafting}
            self.selection.learn(self.request_id, gains)

    def _draw(self, mean: float) -> int:
        whole, rest = divmod(mean, 1.0)
        return int(whole) + (self._rng.random() < rest)

    def share(self, part: int, last: int) -> float:
        """How often a part drafted in the last steps."""
        return sum(part in drafting for drafting in self.drafted[-last:]) / last


def test_parts_with_a_gain_stay() -> None:
    text = Text(PartSelection(range(2)), [1.0, 0.5])
    text.step(2000)
    assert all(drafting == [0, 1] for drafting in text.drafted)


def test_a_part_without_a_gain_is_suspended_but_tried() -> None:
    text = Text(PartSelection(range(2)), [1.0, 0.0])
    text.step(4000)
    assert text.drafted[0] == [0, 1]
    assert 0 < text.share(1, 1000) < 0.1
    assert text.share(0, 4000) == 1


def test_a_suspended_part_is_reinstated_when_it_has_a_gain() -> None:
    text = Text(PartSelection(range(2)), [1.0, 0.0])
    text.step(3000)
    text.gain[1] = 0.6
    text.step(RESTS[1] + 2 * TRIAL_STEPS)
    text.step(200)
    assert text.share(1, 200) == 1


def test_one_part_always_stays() -> None:
    text = Text(PartSelection(range(3)), [0.0, 0.0, 0.0])
    text.step(3000)
    assert all(text.drafted)
    assert text.drafted.count([0]) > 2000


def test_what_one_request_shows_holds_for_the_next() -> None:
    selection = PartSelection(range(2))
    Text(selection, [1.0, 0.0]).step(4000)
    selection.end("a")
    second = Text(selection, [1.0, 0.0], "b")
    second.step(1)
    assert second.drafted[0] in ([0], [0, 1])  # at most a trial
    assert selection.active == [0]


def test_of_two_parts_that_propose_the_same_one_stays() -> None:
    """Neither has a gain next to the other, and the first one has all of it alone."""
    text = Text(PartSelection(range(2)), [0.0, 0.0])
    while len(text.selection.active) == 2:
        text.step()
    text.gain[0] = 1.0
    text.step(2000)
    assert text.share(0, 2000) == 1


def test_a_trial_that_its_request_does_not_finish_goes_to_another() -> None:
    selection = PartSelection(range(2))
    first = Text(selection, [1.0, 0.0])
    while 1 in selection.active:
        first.step()
    first.step()
    while 1 not in first.drafted[-1]:
        first.step()
    other = Text(selection, [1.0, 0.5], "b")
    other.step(3)
    assert other.share(1, 3) == 0  # a part may have to warm up in one request
    selection.end("a")
    other.step(200)
    assert other.drafted[3] == [0, 1]
    assert other.share(1, 50) == 1
