"""Engines of the benchmarks: what happens in their steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from support.harness import Row
from vllm_trie.lab.local_engine import (
    batches,
    decode_steps,
    generate,
    new_salts,
    runner_of,
    scheduler_of,
    verifier_of,
)

Prompts = Sequence[Sequence[int]]


def keep_kernel_overrides() -> None:
    """Let later engines of this process use the kernel overrides of the first.

    vLLM 0.32 registers its overrides for the CPU again with every engine, and its search through
    all loaded modules fails on one of numba's, which the method `ngram` imports.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def decode(llm: Any, prompts: Prompts, params: Any, batch_size: int) -> list[list[int]]:
    """Return the output tokens of all prompts, `batch_size` at a time. What drafters remember of
    one batch they know in the next, and not in another call."""
    [salt] = new_salts([[]])
    return [
        output
        for group in batches(prompts, batch_size)
        for output in generate(llm, group, params, salt)
    ]


def count_steps(llm: Any, prompts: Prompts, params: Any, batch_size: int) -> Row:
    """Decode all prompts; return tokens and verified nodes of a step and request."""
    steps = [
        step
        for group in batches(prompts, batch_size)
        for work in decode_steps(llm, group, params)
        for step in work
    ]
    return {
        "tokens_per_step": sum(len(step.tokens) for step in steps) / len(steps),
        "nodes_per_step": sum(step.tree.num_nodes for step in steps) / len(steps),
    }


def served(
    llm: Any, requests: Iterable[tuple[str, Any, Any]], at_once: int
) -> Iterator[tuple[float, list[Any]]]:
    """Answer requests, at most `at_once` at a time: the next one begins when another has ended.

    Args:
        requests: id, vLLM's input and parameters of each.

    Yields:
        After each step its seconds, with the intake of its requests, and its outputs.
    """
    waiting, num_running = iter(requests), 0
    while True:
        start = time.perf_counter()
        for request in islice(waiting, at_once - num_running):
            llm.llm_engine.add_request(*request)
            num_running += 1
        if not num_running:
            return
        outputs = llm.llm_engine.step()
        seconds = time.perf_counter() - start
        num_running -= sum(output.finished for output in outputs)
        yield seconds, outputs


def after_each_step(llm: Any, call: Callable[[Any], None]) -> None:
    """Call `call` with the engine's `TreeVerifier` after each step that sampled tokens."""
    runner, trees = runner_of(llm), verifier_of(llm)
    stock = runner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        call(trees)
        return output

    runner.sample_tokens = sample_tokens


@contextmanager
def each_schedule(llm: Any, call: Callable[[Any], None]) -> Iterator[None]:
    """Call `call` with each output of the engine's scheduler, while the block runs."""
    scheduler = scheduler_of(llm)
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        call(output)
        return output

    scheduler.schedule = schedule
    try:
        yield
    finally:
        del scheduler.schedule
