"""Drafts give way to prompts, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_trie.vllm_hooks.scheduler.speculation import SHARE, WEIGHT, FirstTokens

DRAFT = list(range(20))


def request(num_prompt_tokens: int = 100, num_computed: int = 100, draft: Any = ()) -> Any:
    return SimpleNamespace(
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed,
        spec_token_ids=list(draft),
    )


def decoding() -> Any:
    return request(num_computed=120, draft=DRAFT)


class Step:
    """A scheduler with two requests that decode, and others."""

    def __init__(self, running: Any = (), waiting: Any = (), places: int = 8) -> None:
        self.scheduler: Any = SimpleNamespace(
            running=[decoding(), decoding(), *running],
            waiting=list(waiting),
            max_num_running_reqs=places,
            max_num_scheduled_tokens=2048,
        )
        self.policy = FirstTokens(self.scheduler)

    def drafted(self, num_started: int = 0) -> list[int]:
        """Take a step in which `num_started` requests start; return the nodes of each draft."""
        for each in self.scheduler.running[:2]:
            each.spec_token_ids = list(DRAFT)
        self.policy.before_schedule()
        kept = [each.spec_token_ids for each in self.scheduler.running[:2]]
        assert all(nodes == DRAFT[: len(nodes)] for nodes in kept)
        for _ in range(num_started):
            self.scheduler.running.append(self.scheduler.waiting.pop(0))
        self.policy.after_schedule()
        return list(map(len, kept))


def test_drafts_stay_where_nobody_waits():
    assert Step().drafted() == [20, 20]


def test_drafts_give_way_to_a_request_that_can_start():
    assert Step(waiting=[request(50, 0)]).drafted(1) == [0, 0]


def test_drafts_give_way_to_a_prompt_that_is_half_computed():
    assert Step(running=[request(400, 300)]).drafted() == [1, 1]


def test_a_long_prompt_leaves_room_for_a_few_nodes():
    nodes = int(SHARE * 1000) // 2
    assert nodes > 5
    assert Step(waiting=[request(1000, 0)]).drafted(1) == [nodes, nodes]
    # More than a step computes makes no more room.
    most = int(SHARE * 2048) // 2
    assert Step(waiting=[request(9000, 0)]).drafted(1) == [min(most, 20)] * 2


def test_drafts_stay_where_many_decode_and_one_waits():
    def drafted(num_waiting: int) -> list[int]:
        others = [decoding() for _ in range(WEIGHT)]
        waiting = [request(50, 0) for _ in range(num_waiting)]
        return Step(others, waiting, places=64).drafted(num_waiting)

    assert drafted(1) == [20, 20]
    assert drafted(2) == [0, 0]


def test_drafts_stay_where_a_request_waits_for_a_place():
    """It starts when another one ends, and drafts bring that about."""
    assert Step(waiting=[request(50, 0)], places=2).drafted() == [20, 20]


def test_drafts_return_where_giving_way_starts_nobody():
    """The KV cache has no room: the request waits for another one's end."""
    step = Step(waiting=[request(50, 0)])
    assert step.drafted(num_started=0) == [0, 0]
    assert step.drafted(num_started=0) == [20, 20]
    del step.scheduler.running[1]  # one has ended
    assert step.drafted(num_started=1) == [int(SHARE * 50)]
