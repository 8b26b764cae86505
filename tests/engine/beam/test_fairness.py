"""Waiting times of groups and ordinary requests next to each other, in steps."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from tests.engine.beam.simulation import Simulation

Arrival = Callable[[Simulation], str]


def request(name: str, max_tokens: int, **options: Any) -> Arrival:
    """An ordinary request, of exactly `max_tokens` unless told otherwise."""
    options = {"ignore_eos": True, **options}
    prompt = [sum(map(ord, name)) % 23 + 1, 2]
    return lambda simulation: simulation.add_greedy(name, prompt, max_tokens, **options)


def group(name: str, width: int, max_tokens: int = 16, priority: int = 0) -> Arrival:
    return lambda simulation: simulation.add_beam(
        name, [7, 8, 9], width, 1, priority, max_tokens=max_tokens
    )


def run(
    vllm_config: Any, arrivals: dict[int, list[Arrival]], **engine: Any
) -> tuple[int, dict[str, int]]:
    """Run a load; returns the number of steps, and the steps from arrival to end of each request.

    Args:
        arrivals: Step to what arrives before it.
        engine: Options of the engine, which has 32 slots and enough blocks.
    """
    engine = {"max_num_seqs": 32, "num_blocks": 400, "block_size": 16, **engine}
    simulation = Simulation(vllm_config, max_num_batched_tokens=512, **engine)
    started: dict[str, int] = {}
    took: dict[str, int] = {}
    step = 0
    while step <= max(arrivals) or simulation.open:
        for arrive in arrivals.get(step, ()):
            started[arrive(simulation)] = step
        if simulation.scheduler.has_requests() or simulation._queue:
            simulation.step()
        step += 1
        for name in started.keys() - took.keys() - simulation.open:
            took[name] = step - started[name]
        assert step < 3000, f"still waiting: {sorted(simulation.open)[:5]}"
    simulation.run()
    simulation.check_clean()
    return step, took


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_wide_group_among_many_ordinary_requests(vllm_config, asynchronous, policy):
    """Three requests arrive a step; without the group they take 212 steps."""
    arrivals = {i: [request(f"r{3 * i + j}", 30) for j in range(3)] for i in range(67)}
    arrivals[20].append(group("wide", 32))
    steps, took = run(vllm_config, arrivals, asynchronous=asynchronous, policy=policy)
    assert steps <= 280
    # Requests that came before it, those that run, and its own 16 or 32 steps.
    assert took.pop("wide") <= 100
    assert median(took.values()) <= 140


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_short_requests_do_not_wait_for_a_group_that_waits_for_a_long_one(
    vllm_config, asynchronous, policy
):
    arrivals = {0: [request("long", 900)], 5: [group("wide", 32)]}
    arrivals |= {i: [request(f"r{i}", 20)] for i in range(10, 1000, 3)}
    _, took = run(vllm_config, arrivals, asynchronous=asynchronous, policy=policy)
    assert took.pop("wide") <= 900 + 40  # it starts as soon as it can
    assert took.pop("long") <= 905
    assert max(took.values()) <= 20 + 64  # those at the end wait for the group
    assert median(took.values()) <= 22


def test_group_ages_where_limits_say_nothing(vllm_config):
    """Every request may take 2,000 tokens and most take a few: neither side waits for that long."""
    arrivals = {0: [request("long", 300, ignore_eos=True)], 5: [group("wide", 32)]}
    arrivals |= {i: [request(f"r{i}", 2000, ignore_eos=False)] for i in range(10, 500)}
    _, took = run(vllm_config, arrivals)
    assert took.pop("long") == 300
    assert took.pop("wide") <= 3 * 300
    assert median(took.values()) <= 40


def test_narrow_group_ends_before_a_wide_one_can_start(vllm_config):
    arrivals = {
        0: [request("long", 300)],
        5: [group("wide", 32)],
        10: [group("narrow", 4)],
        250: [group("late", 4, max_tokens=100), group("short", 4)],
    }
    _, took = run(vllm_config, arrivals)
    assert took["narrow"] <= 20
    assert took["short"] <= 20  # it ends before the long request does
    assert took["late"] > 300 - 250  # it would not, and starts after the wide group
    assert took["wide"] <= 300 + 20


def test_slots_that_a_group_leaves_over_are_used(vllm_config):
    """Two of four slots are enough for the group when the two requests of 40 tokens end."""
    arrivals = {
        0: [request("a", 40), request("b", 40), request("c", 200)],
        5: [group("wide", 2)],
        6: [request("d", 200)],
    }
    _, took = run(vllm_config, arrivals, max_num_seqs=4)
    assert took["wide"] <= 60
    assert took["d"] <= 202


@pytest.mark.parametrize(
    ("most", "widths", "started"),
    [(400, [3], ["c", "short"]), (400, [4, 3], ["short"]), (30, [2], ["of2~1"])],
)
def test_long_requests_of_a_step_count_once(vllm_config, most, widths, started):
    """One takes the slot that the group leaves over, when two have ended, and the next does not.
    Of two groups that lack slots the first one claims them; one that lacks none claims none."""
    arrivals = [request("a", most), request("b", 400)]
    arrivals += [group(f"of{width}", width, 100) for width in widths]
    arrivals += [request("c", 400), request("d", 400), request("short", 40)]
    simulation = Simulation(vllm_config, num_blocks=400, block_size=16, max_num_seqs=4)
    for arrive in arrivals:
        arrive(simulation)
    simulation.step()
    running = [request.request_id for request in simulation.scheduler.running]
    assert running == ["a", "b", *started]


def test_urgent_group_starts_before_one_that_has_waited_longer(vllm_config):
    arrivals = {
        0: [request("runs", 20)],
        1: [group("patient", 8, priority=2)],
        2: [group("urgent", 8, priority=1)],
    }
    _, took = run(vllm_config, arrivals, max_num_seqs=8, policy="priority")
    assert took["urgent"] < took["patient"]


def test_urgent_requests_do_not_wait_for_a_group(vllm_config):
    """The group has no claim against requests that come before it in the queue."""
    arrivals = {0: [request("runs", 50)], 1: [group("wide", 8, priority=2)]}
    arrivals |= {i: [request(f"r{i}", 50, priority=1)] for i in (5, 10)}
    _, took = run(vllm_config, arrivals, max_num_seqs=8, policy="priority")
    assert took["r5"] <= 52
    assert took["r10"] <= 52
