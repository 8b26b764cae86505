"""Engines on the same prompts: speed, equality of the output, the trees of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from vllm_trie.lab.local_engine import RequestStep, decode_steps, generate, interleave

PLAIN = "plain"
"""The engine without speculation, the baseline."""
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
    """Results of one batch of prompts, or of all.

    Attributes:
        name: Of the prompts.
        tokens: Output tokens.
        seconds: By engine: plain vLLM first, the method with trees last.
        steps: Of the method, those that gave tokens, summed over the requests; the prefill's count.
        nodes: Draft tokens of the method that were verified.
        identical: Whether the method's output was plain vLLM's in every repeat.
    """

    name: str
    tokens: int
    seconds: Mapping[str, float]
    steps: int
    nodes: int
    identical: bool

    @property
    def method(self) -> str:
        return list(self.seconds)[-1]

    @property
    def best_peer(self) -> str | None:
        """The fastest of vLLM's own methods; None without any."""
        return min(list(self.seconds)[1:-1], key=self.seconds.__getitem__, default=None)

    def tokens_per_s(self, engine: str) -> float:
        return self.tokens / self.seconds[engine]

    def speed_up(self, over: str = PLAIN) -> float:
        """Return the method's speed relative to another engine."""
        return self.seconds[over] / self.seconds[self.method]

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
        {name: sum(row.seconds[name] for row in rows) for name in rows[0].seconds},
        sum(row.steps for row in rows),
        sum(row.nodes for row in rows),
        all(row.identical for row in rows),
    )


def observe(
    llm: Any, names: Sequence[str], prompts: Sequence[Sequence[int]], params: Any
) -> tuple[list[list[int]], int, list[ObservedStep]]:
    """Decode one batch; return the outputs, the number of steps and those that verified a tree."""
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
    return list(map(list, outputs)), sum(counts), observed


def compare(
    engines: Mapping[str, Any],
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    params: Any,
    repeats: int,
    advance: Callable[[str], None] = lambda text: None,
) -> tuple[Row, list[list[int]], list[ObservedStep]]:
    """Run one batch on all engines in turns.

    Args:
        engines: By name, warm; plain vLLM first, the method with trees last.
        names: Of the prompts.
        prompts: Token ids.
        params: vLLM's sampling parameters.
        repeats: Timed runs of each engine; the row has their medians.
        advance: Is told before each run what runs.

    Returns:
        The row, plain vLLM's outputs, and the method's steps with trees.
    """
    method = list(engines)[-1]

    def run(name: str) -> tuple[list[list[int]], int, list[ObservedStep]]:
        advance(f"{', '.join(names)}: {name}")
        if name == method:
            return observe(engines[name], names, prompts, params)
        return generate(engines[name], prompts, params), 0, []

    timed = interleave({name: partial(run, name) for name in engines}, repeats)
    expected = timed[PLAIN][0][1][0]
    _, (_, num_steps, observed) = timed[method][-1]
    row = Row(
        ", ".join(names),
        sum(map(len, expected)),
        {name: median(seconds for seconds, _ in runs) for name, runs in timed.items()},
        num_steps,
        sum(observation.step.tree.num_nodes for observation in observed),
        all(decoded == expected for _, (decoded, _, _) in [*timed[PLAIN], *timed[method]]),
    )
    return row, expected, observed


def most_telling(observed: Sequence[ObservedStep]) -> ObservedStep | None:
    """Return the step to draw: one that a chain could not have made, with many choices."""

    def rank(drafted: ObservedStep) -> tuple[bool, bool, int, int]:
        accepted, tree = drafted.step.accepted, drafted.step.tree
        num_choices = sum(number > 1 for number in Counter(tree.parents.tolist()).values())
        branched = accepted != tuple(range(len(accepted)))
        return len(accepted) >= MIN_ACCEPTED, branched, num_choices, len(accepted)

    return max(observed, key=rank, default=None)
