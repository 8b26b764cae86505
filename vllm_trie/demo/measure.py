"""Two engines on the same prompts: speed, equality of the output, and the trees of each step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from vllm_trie.demo.engines import runner_of
from vllm_trie.tree import TokenTree

MIN_ACCEPTED = 3
"""A step is worth drawing if it accepted this many tokens."""


class ObservedStep(NamedTuple):
    """One verified tree of one request."""

    prompt: int
    """Index of the request's prompt."""
    step: int
    """How many steps the request had before, its prefill included."""
    output_before: tuple[int, ...]
    """Output tokens that were committed before the step."""
    tree: TokenTree
    accepted: tuple[int, ...]
    """Accepted node indices, root first."""
    new_tokens: tuple[int, ...]
    """What the step brought: the accepted nodes' tokens and the bonus token."""


@dataclass(slots=True)
class Counts:
    """Work on one prompt.

    Attributes:
        steps: steps that brought tokens, the prefill's included.
        tokens: output tokens.
        nodes: nodes of the trees that were verified.
    """

    steps: int = 0
    tokens: int = 0
    nodes: int = 0


@dataclass(slots=True)
class Timing:
    """Seconds for one batch of prompts, a value for each repeat, plain and with trees."""

    plain: list[float] = field(default_factory=list)
    trees: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the result: a batch of prompts, or all of them."""

    name: str
    tokens: int
    plain_seconds: float
    tree_seconds: float
    tokens_per_step: float
    nodes_per_step: float
    identical: bool

    @property
    def plain_tokens_per_s(self) -> float:
        return self.tokens / self.plain_seconds

    @property
    def tree_tokens_per_s(self) -> float:
        return self.tokens / self.tree_seconds

    @property
    def speed_up(self) -> float:
        return self.plain_seconds / self.tree_seconds


def batches(prompts: Sequence[Any], batch_size: int) -> list[range]:
    """Indices of the prompts that run together."""
    return [
        range(start, min(start + batch_size, len(prompts)))
        for start in range(0, len(prompts), batch_size)
    ]


def generate(
    llm: Any, prompts: Sequence[Sequence[int]], params: Any
) -> tuple[list[list[int]], float]:
    """Output tokens of each prompt, all in one batch, and the seconds that it took."""
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def observe(
    llm: Any, prompts: Sequence[Sequence[int]], params: Any, first: int = 0
) -> tuple[list[Counts], list[ObservedStep]]:
    """Run one batch step by step and look at the trees that the model runner verified.

    Args:
        llm: an engine in this process, with trees or without.
        prompts: token ids of the batch's prompts.
        params: vLLM's sampling parameters.
        first: index of the first prompt, for the steps' `prompt`.
    """
    from vllm.sampling_params import RequestOutputKind

    engine, runner = llm.llm_engine, runner_of(llm)
    params = params.clone()
    params.output_kind = RequestOutputKind.CUMULATIVE  # an output for each step
    index_of = {f"demo-{first + i}": i for i in range(len(prompts))}
    for name, prompt in zip(index_of, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    counts = [Counts() for _ in prompts]
    steps: list[ObservedStep] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = index_of[output.request_id]
            count, tokens = counts[index], tuple(output.outputs[0].token_ids)
            before, count.tokens = count.tokens, len(tokens)
            count.steps += 1
            verified = _verified_step(runner, output.request_id)
            if verified is not None and verified.tree.num_nodes:
                count.nodes += verified.tree.num_nodes
                # Text after a stop is cut off, so the output may hold fewer tokens than the step.
                steps.append(
                    ObservedStep(
                        first + index,
                        count.steps - 1,
                        tokens[:before],
                        verified.tree,
                        verified.accepted[: count.tokens - before],
                        tokens[before:],
                    )
                )
    return counts, steps


def _verified_step(runner: Any, request_id: str) -> Any:
    """What the runner remembers of a request; vLLM appends to the ids that it is given."""
    for internal_id, step in getattr(runner, "_last_steps", {}).items():
        if internal_id == request_id or internal_id.startswith(f"{request_id}-"):
            return step
    return None


def compare(
    plain: Any,
    trees: Any,
    prompts: Sequence[Sequence[int]],
    params: Any,
    batch_size: int,
    repeats: int,
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[Timing], list[bool], list[int]]:
    """Time both engines in turns, batch by batch, and compare every output.

    Args:
        plain, trees: the engines.
        prompts: token ids of the prompts.
        params: vLLM's sampling parameters.
        batch_size: prompts that run together.
        repeats: how often each engine runs each batch.
        advance: called after every run.

    Returns:
        The timing of each batch; whether all outputs of a batch were the same in every repeat and
        both engines; the number of output tokens of each batch.
    """
    groups = batches(prompts, batch_size)
    timings = [Timing() for _ in groups]
    identical = [True] * len(groups)
    tokens = [0] * len(groups)
    for repeat in range(repeats):
        for number, group in enumerate(groups):
            some = [prompts[index] for index in group]
            runs = [(plain, timings[number].plain), (trees, timings[number].trees)]
            outputs = []
            for llm, seconds in runs if repeat % 2 == 0 else reversed(runs):
                found, elapsed = generate(llm, some, params)
                outputs.append(found)
                seconds.append(elapsed)
                advance()
            identical[number] &= outputs[0] == outputs[1]
            tokens[number] = sum(map(len, outputs[0]))
    return timings, identical, tokens


def summarize(
    names: Sequence[str],
    timings: Sequence[Timing],
    identical: Sequence[bool],
    tokens: Sequence[int],
    counts: Sequence[Counts],
    batch_size: int,
) -> list[Row]:
    """One row per batch, from medians over the repeats, and one for all of them at the end."""
    rows = []
    for number, group in enumerate(batches(names, batch_size)):
        some = [counts[index] for index in group]
        rows.append(
            Row(
                ", ".join(names[index] for index in group),
                tokens[number],
                median(timings[number].plain),
                median(timings[number].trees),
                *_per_step(some),
                identical[number],
            )
        )
    total = Row(
        "all",
        sum(tokens),
        sum(row.plain_seconds for row in rows),
        sum(row.tree_seconds for row in rows),
        *_per_step(counts),
        all(identical),
    )
    return [*rows, total]


def _per_step(counts: Sequence[Counts]) -> tuple[float, float]:
    steps = max(1, sum(count.steps for count in counts))
    return (
        sum(count.tokens for count in counts) / steps,
        sum(count.nodes for count in counts) / steps,
    )


def most_telling(steps: Sequence[ObservedStep]) -> ObservedStep | None:
    """The step to draw: at least `MIN_ACCEPTED` accepted tokens, not all of them on the leading
    path (where a chain would have done), and many places with a choice."""

    def rank(step: ObservedStep) -> tuple[bool, bool, int, int]:
        num_accepted = len(step.accepted)
        num_children = Counter(step.tree.parents.tolist())
        num_choices = sum(number > 1 for number in num_children.values())
        branched = step.accepted != tuple(range(num_accepted))
        return num_accepted >= MIN_ACCEPTED, branched, num_choices, num_accepted

    return max(steps, key=rank, default=None)
