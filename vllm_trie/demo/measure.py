"""Two engines on the same prompts: speed, equality of the output, the trees of each step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from vllm_trie.local_engine import RequestStep, decode_steps, generate

MIN_ACCEPTED = 3
"""Accepted nodes of a step that is worth drawing."""


class ObservedStep(NamedTuple):
    """One verified tree of one request."""

    prompt: str
    """Name of the request's prompt."""
    number: int
    """Steps of the request before this one, its prefill included."""
    output_before: tuple[int, ...]
    """Output tokens before the step."""
    step: RequestStep


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one batch of prompts, or of all."""

    name: str
    tokens: int
    """Output tokens."""
    plain_seconds: float
    tree_seconds: float
    steps: int
    """Steps that gave tokens, summed over the requests; the prefill's count."""
    nodes: int
    """Draft tokens that were verified."""
    identical: bool
    """Whether both engines gave the same output in every repeat."""

    @property
    def plain_tokens_per_s(self) -> float:
        return self.tokens / self.plain_seconds

    @property
    def tree_tokens_per_s(self) -> float:
        return self.tokens / self.tree_seconds

    @property
    def speed_up(self) -> float:
        return self.plain_seconds / self.tree_seconds

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)

    @property
    def nodes_per_step(self) -> float:
        return self.nodes / max(1, self.steps)


def total(rows: Sequence[Row]) -> Row:
    """Return the sum of all rows."""
    return Row(
        "all",
        sum(row.tokens for row in rows),
        sum(row.plain_seconds for row in rows),
        sum(row.tree_seconds for row in rows),
        sum(row.steps for row in rows),
        sum(row.nodes for row in rows),
        all(row.identical for row in rows),
    )


def observe(
    llm: Any, names: Sequence[str], prompts: Sequence[Sequence[int]], params: Any
) -> tuple[int, list[ObservedStep]]:
    """Decode one batch; return the number of steps and those that verified a tree."""
    outputs: list[tuple[int, ...]] = [()] * len(prompts)
    counts = [0] * len(prompts)
    observed = []
    for steps in decode_steps(llm, prompts, params):
        for step in steps:
            index = step.prompt
            if step.tree.num_nodes:
                observed.append(ObservedStep(names[index], counts[index], outputs[index], step))
            outputs[index] += step.tokens
            counts[index] += 1
    return sum(counts), observed


def compare(
    plain: Any,
    trees: Any,
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    params: Any,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Row, list[ObservedStep]]:
    """Run one batch on both engines in turns, after one run of each to warm up.

    Args:
        plain, trees: the engines.
        names: of the prompts.
        prompts: token ids.
        params: vLLM's sampling parameters.
        repeats: timed runs of each engine; the row has their medians.
        advance: called after each of the 2 + 2 * repeats runs.
    """
    expected = generate(plain, prompts, params)
    advance()
    num_steps, observed = observe(trees, names, prompts, params)
    advance()
    seconds: tuple[list[float], list[float]] = ([], [])
    identical = True
    for repeat in range(repeats):
        for which in (0, 1) if repeat % 2 == 0 else (1, 0):
            start = time.perf_counter()
            outputs = generate((plain, trees)[which], prompts, params)
            seconds[which].append(time.perf_counter() - start)
            identical &= outputs == expected
            advance()
    row = Row(
        ", ".join(names),
        sum(map(len, expected)),
        median(seconds[0]),
        median(seconds[1]),
        num_steps,
        sum(each.step.tree.num_nodes for each in observed),
        identical,
    )
    return row, observed


def most_telling(observed: Sequence[ObservedStep]) -> ObservedStep | None:
    """Return the step to draw: one that a chain could not have made, with many choices."""

    def rank(each: ObservedStep) -> tuple[bool, bool, int, int]:
        accepted, tree = each.step.accepted, each.step.tree
        num_choices = sum(number > 1 for number in Counter(tree.parents.tolist()).values())
        branched = accepted != tuple(range(len(accepted)))
        return len(accepted) >= MIN_ACCEPTED, branched, num_choices, len(accepted)

    return max(observed, key=rank, default=None)
