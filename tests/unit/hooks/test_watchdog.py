"""The watchdog ends what runs too long, and touches nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from vllm_trie.vllm_hooks.worker.drafting.watchdog import TimeLimitExceeded, Watchdog

pytestmark = pytest.mark.timeout(60)  # a watchdog that fails lets the test hang

AGES = 60.0
"""No call in these tests takes this long unless the watchdog failed."""


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_results_and_exceptions_pass_through() -> None:
    watchdog = Watchdog(30.0)
    assert watchdog.call(lambda: 41 + 1) == 42
    with pytest.raises(KeyError, match="mine"):
        watchdog.call(lambda: {}["mine"])
    with pytest.raises(KeyboardInterrupt):
        watchdog.call(_interrupt)
    assert watchdog.call(lambda: "still there") == "still there"


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_endless_loop_ends() -> None:
    watchdog = Watchdog(0.1)
    start = time.monotonic()
    with pytest.raises(TimeLimitExceeded, match=r"no answer within 0\.1 s"):
        watchdog.call(lambda: _spin(AGES))
    assert time.monotonic() - start < AGES / 4
    assert watchdog.call(lambda: 1) == 1


def test_a_loop_that_catches_every_exception_ends() -> None:
    def stubborn() -> None:
        while True:
            try:
                _spin(AGES)
            except Exception:
                continue

    with pytest.raises(TimeLimitExceeded):
        Watchdog(0.05).call(stubborn)


def test_a_call_that_swallows_the_first_interrupt_gets_another() -> None:
    swallowed = []

    def swallow_two() -> None:
        while True:
            try:
                _spin(AGES)
            except BaseException:
                swallowed.append(time.monotonic())
                if len(swallowed) > 2:
                    raise

    with pytest.raises(TimeLimitExceeded):
        Watchdog(0.05).call(swallow_two)
    assert len(swallowed) == 3


def test_native_code_is_ended_when_it_comes_back() -> None:
    with pytest.raises(TimeLimitExceeded):
        Watchdog(0.05).call(lambda: time.sleep(0.4))


def test_a_late_exception_counts_as_late() -> None:
    def fail_late() -> None:
        try:
            _spin(AGES)
        finally:
            raise ValueError("too late to matter")

    with pytest.raises(TimeLimitExceeded):
        Watchdog(0.05).call(fail_late)


def test_nothing_is_hit_after_a_call_that_ends_near_the_limit() -> None:
    """Whether such a call is in time is open; code after it must never see the interrupt."""
    watchdog = Watchdog(0.02)
    outcomes = set()
    for trial in range(16):
        seconds = 0.015 + 0.001 * trial
        try:
            outcomes.add(watchdog.call(lambda seconds=seconds: _spin(seconds)))
        except TimeLimitExceeded:
            outcomes.add("late")
        _spin(0.01)
    assert "late" in outcomes


def test_only_the_calling_thread_is_interrupted() -> None:
    watchdog = Watchdog(0.1)
    outcome = []

    def call() -> None:
        try:
            watchdog.call(lambda: _spin(AGES))
        except TimeLimitExceeded:
            outcome.append("ended")

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    while thread.is_alive():
        _spin(0.01)
    assert outcome == ["ended"]


def test_one_guard_thread_serves_all_calls() -> None:
    watchdog = Watchdog(30.0)
    watchdog.call(lambda: None)
    before = threading.active_count()
    for _ in range(100):
        watchdog.call(lambda: None)
    assert threading.active_count() == before
