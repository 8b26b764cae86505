"""Throughput by batch size: plain vLLM and its drafters; fixed and adaptive trees, and chains.

Two workloads. `matching` decodes the demo's prompts greedily; their answers reuse their context.
`random` samples from prompts of random tokens at a high temperature: no draft can succeed, and the
best that speculation can do is to stay out of the way.

A batch that starts together ends with its slowest requests alone. With `--requests-per-slot 8` the
next request takes a place as soon as it is free, so the batch stays full nearly all the time, as on
a busy server. The queue repeats prompts, and cache salts keep drafters from knowing them. `ngram`
is the tuned one of peers.py; `suffix` runs if its package is installed.

    python benchmarks/load.py --json load.json

The engines work on a queue in turns of a second, so a slow spell of the machine costs all of them
the same. `ratio_to_plain` is the ratio of the times of a whole queue, the median over the repeats;
`cpu_ratio` is that of the process's CPU time, with its range over the repeats. `step_ratio` is the
ratio of the median CPU time of a step with a full batch and no prompt, with a bootstrap interval of
95 %: where no draft is verified both do the same work, and the rest is the plugin's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Sequence
from itertools import count, islice
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from support.device import add_device_options, check_device, engine_options, start_engine
from support.engines import Prompts, count_steps, keep_kernel_overrides
from support.harness import (
    Progress,
    Row,
    add_model_option,
    median_ratio,
    median_seconds,
    option_parser,
    report_quietly,
    take_turns,
)
from support.peers_engines import METHODS, available

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "nodes", "prompts", "batch_size", "tokens_per_s", "ratio_to_plain", "cpu_ratio",
    "cpu_ratio_low", "cpu_ratio_high", "step_ratio", "step_ratio_low", "step_ratio_high",
    "nodes_per_step", "tokens_per_step",
)  # fmt: skip
PEERS = ("ngram", "ngram_gpu", "suffix")
SUFFIX_TOKENS = 24
"""Draft tokens of `suffix`, vLLM's default."""
BOOTSTRAP = 1000
"""Resamples of an interval."""


def speculative_configs(
    nodes: Sequence[int], adaptive_nodes: int
) -> dict[tuple[str, int], dict[str, Any] | None]:
    """Return the contestants: name and node limit -> vLLM's `speculative_config`.

    Args:
        nodes: fixed budgets.
        adaptive_nodes: limit of the adaptive ones, trees and chains.
    """
    peers = [
        (name, {**(METHODS[name] or {}), **local_engine.without_memory(name)})
        for name in available(PEERS)
    ]
    memory = local_engine.without_memory("ngram_trie")
    adaptive = {"method": "ngram_trie", "num_speculative_tokens": adaptive_nodes, **memory}
    fixed = {
        (f"ngram_trie fixed {n}", n): {
            "method": "ngram_trie",
            "num_speculative_tokens": n,
            "node_budget": "fixed",
            **memory,
        }
        for n in nodes
    }
    return {
        ("plain", 0): None,
        **{
            (peer, config.get("num_speculative_tokens", SUFFIX_TOKENS)): config
            for peer, config in peers
        },
        **fixed,
        ("ngram_trie adaptive", adaptive_nodes): adaptive,
        ("ngram_trie chain", adaptive_nodes): {**adaptive, "verification": "chain"},
    }


def main() -> None:
    """Measure and print."""
    smoke = {"nodes": [8], "batch_sizes": [2], "max_tokens": 8}
    parser = option_parser(__doc__, smoke=smoke)
    add_model_option(parser, "a chat model; the shipped one if left out")
    parser.add_argument(
        "--nodes", nargs="*", type=int, default=[8, 32], help="fixed budgets to compare"
    )
    parser.add_argument(
        "--adaptive-nodes", type=int, default=32, help="node limit of the adaptive budget"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--requests-per-slot", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--workloads", nargs="+", default=["matching", "random"])
    add_device_options(parser)
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start all engines, then measure every batch size of both workloads."""
    from support.prompts import demo_chats
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from vllm_trie.lab.tiny_model import model_path

    model = options.model or str(model_path())
    matching = list(demo_chats(model).values())
    rng, vocab_size = random.Random(0), local_engine.text_config(model).vocab_size
    noise = [
        [rng.randrange(10, vocab_size) for _ in range(rng.randint(60, 160))] for _ in range(64)
    ]
    check_device(options.device)
    limits: dict[str, Any] = {
        **engine_options(options),
        "max_model_len": local_engine.room_for(
            max(map(len, [*matching, *noise])),
            options.max_tokens,
            max([options.adaptive_nodes, *options.nodes]),
        ),
        "max_num_seqs": max(options.batch_sizes),
    }
    llms = {}
    for key, config in speculative_configs(options.nodes, options.adaptive_nodes).items():
        llms[key] = start_engine(model, **limits, speculative_config=config)
        keep_kernel_overrides()
    workloads = {
        "matching": (matching, {"temperature": 0.0}),
        "random": (noise, {"temperature": 2.0}),
    }
    rows = []
    for workload in options.workloads:
        prompts, sampling = workloads[workload]
        for batch_size in options.batch_sizes:
            params = SamplingParams(
                max_tokens=options.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                **sampling,
            )
            num_requests = batch_size * options.requests_per_slot
            queue = [prompts[i % len(prompts)] for i in range(num_requests)]
            rows += compare(llms, workload, queue, batch_size, params, options.repeats)
    return rows


def compare(
    llms: dict[tuple[str, int], Any],
    workload: str,
    queue: Prompts,
    batch_size: int,
    params: Any,
    repeats: int,
) -> list[Row]:
    """Return the rows of all contestants for one queue of prompts, plain vLLM first."""
    # This run warms the engines up, too.
    counted = {
        key: count_steps(llm, queue[:batch_size], params, batch_size) for key, llm in llms.items()
    }
    timed: dict[tuple[str, int], list[tuple[float, Work]]] = {key: [] for key in llms}
    for _ in range(repeats):
        works = take_turns([serve(llm, queue, batch_size, params) for llm in llms.values()])
        for key, work in zip(llms, works, strict=True):
            timed[key].append((work.seconds, work))
    return [
        {
            "method": method,
            "nodes": nodes,
            "prompts": workload,
            "batch_size": batch_size,
            "tokens_per_s": len(queue) * params.max_tokens / median_seconds(timed[method, nodes]),
            "ratio_to_plain": median_ratio(timed["plain", 0], timed[method, nodes]),
            **cpu_ratios(
                [work for _, work in timed["plain", 0]], [w for _, w in timed[method, nodes]]
            ),
            **counted[method, nodes],
        }
        for method, nodes in llms
    ]


class Work(NamedTuple):
    """Time that an engine spent on a queue."""

    seconds: float
    """Of all steps."""
    cpu_seconds: float
    """Likewise, of this process."""
    full_steps: list[float]
    """CPU seconds of each step of a full batch without a prompt."""


def cpu_ratios(plain: Sequence[Work], ours: Sequence[Work]) -> Row:
    """Return the ratios of CPU time that the docstring of this file explains.

    Args:
        plain, ours: of each turn.
    """
    ratios = [
        theirs.cpu_seconds / mine.cpu_seconds for theirs, mine in zip(plain, ours, strict=True)
    ]
    row: Row = {
        "cpu_ratio": median(ratios),
        "cpu_ratio_low": min(ratios),
        "cpu_ratio_high": max(ratios),
    }
    steps = [np.array([s for turn in turns for s in turn.full_steps]) for turns in (plain, ours)]
    if all(map(len, steps)):
        rng = np.random.default_rng(0)
        medians = [
            np.median(rng.choice(seconds, (BOOTSTRAP, len(seconds))), axis=1) for seconds in steps
        ]
        low, high = np.quantile(medians[0] / medians[1], [0.025, 0.975])
        row["step_ratio"] = float(np.median(steps[0]) / np.median(steps[1]))
        row |= {"step_ratio_low": float(low), "step_ratio_high": float(high)}
    return row


def serve(
    llm: Any, queue: Prompts, batch_size: int, params: Any
) -> Generator[Progress, None, Work]:
    """Answer all prompts, at most `batch_size` at a time.

    Yields:
        After each step.
    """
    engine = llm.llm_engine
    waiting = iter(local_engine.inputs_of(queue))
    names = count()

    def admit(num_requests: int) -> int:
        number = 0
        for inputs, name in zip(islice(waiting, num_requests), names, strict=False):
            engine.add_request(f"load-{name}", inputs, params)
            number += 1
        return number

    seconds, cpu_seconds, num_tokens, full_steps = 0.0, 0.0, 0, []
    num_running = num_new = admit(batch_size)
    while engine.has_unfinished_requests():
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = engine.step()
        took = time.process_time() - cpu_start
        seconds += time.perf_counter() - start
        cpu_seconds += took
        num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        if not num_new and num_running == batch_size:
            full_steps.append(took)
        num_finished = sum(output.finished for output in outputs)
        num_new = admit(num_finished)
        num_running += num_new - num_finished
        yield Progress(seconds, num_tokens)
    return Work(seconds, cpu_seconds, full_steps)


if __name__ == "__main__":
    main()
