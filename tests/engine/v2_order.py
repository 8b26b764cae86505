"""The order of what happens to each step on Model Runner V2, in all processes of an engine."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.drafts.engine.runners.v2_launched import StepsInFlight

FILE = "V2_ORDER_FILE"
"""Environment variable with the path of the record, which processes append to."""


def note_order() -> None:
    """Note launches of steps, outputs that are sent, waits for tokens, and outputs that arrive."""
    execute, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens
    stock_wait, update = StepsInFlight.wait, Scheduler.update_from_output

    @functools.wraps(execute)  # the plugin compares vLLM's signatures with its table
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            _note("launch")
        return result

    @functools.wraps(sample)
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        result = sample(self, grammar_output)
        _note("send")
        return result

    def wait(self: Any) -> Any:
        _note("wait")
        return stock_wait(self)

    @functools.wraps(update)
    def update_from_output(self: Any, scheduler_output: Any, output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            _note("output")
        return update(self, scheduler_output, output)

    GPUModelRunner.execute_model, GPUModelRunner.sample_tokens = execute_model, sample_tokens
    StepsInFlight.wait, Scheduler.update_from_output = wait, update_from_output


def _note(event: str) -> None:
    if path := os.environ.get(FILE):
        with open(path, "a") as file:
            file.write(f"{time.monotonic_ns()} {event}\n")


def orders(path: Path) -> dict[str, int]:
    """Return how many steps and waits there were, and in how many an event came before another;
    forget the record.

    The n-th launch, send, wait and output belong to one step.
    """
    times: dict[str, list[int]] = {"launch": [], "send": [], "wait": [], "output": []}
    for line in sorted(path.read_text().splitlines()):
        at, event = line.split()
        times[event].append(int(at))
    path.unlink()
    launch, send, wait, output = times.values()
    return {
        "steps": len(launch),
        "waits": len(wait),
        "launched before the output of the last": _earlier(launch[1:], output),
        "launched before sent": _earlier(launch, send),
        "sent before waited for": _earlier(send, wait),
        "waited for before the next launch": _earlier(wait, launch[1:]),
        "output before the next wait": _earlier(output, wait[1:]),
    }


def _earlier(first: list[int], second: list[int]) -> int:
    return sum(a < b for a, b in zip(first, second, strict=False))
