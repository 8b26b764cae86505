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
the same. `ratio_to_plain` is the ratio of the times of a whole queue, the median over the repeats.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

from support.device import add_device_options, check_device, engine_options
from support.engines import Prompts, count_steps, keep_kernel_overrides, served
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
from support.peers_engines import METHODS, PEERS, available

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "nodes", "prompts", "batch_size", "tokens_per_s", "ratio_to_plain", "nodes_per_step",
    "tokens_per_step",
)  # fmt: skip
ADAPTIVE_NODES = 32
"""Node limit of the adaptive budget, trees and chains: the default."""
SUFFIX_TOKENS = 24
"""Draft tokens of `suffix`, vLLM's default."""


def speculative_configs(nodes: Sequence[int]) -> dict[tuple[str, int], dict[str, Any] | None]:
    """Return the contestants: name and node limit -> vLLM's `speculative_config`.

    Args:
        nodes: fixed budgets.
    """
    peers = [
        (name, {**(METHODS[name] or {}), **local_engine.without_memory(name)})
        for name in available(PEERS)
    ]
    memory = local_engine.without_memory("ngram_trie")
    adaptive = {"method": "ngram_trie", "num_speculative_tokens": ADAPTIVE_NODES, **memory}
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
        ("ngram_trie adaptive", ADAPTIVE_NODES): adaptive,
        ("ngram_trie chain", ADAPTIVE_NODES): {**adaptive, "verification": "chain"},
    }


def main() -> None:
    """Measure and print."""
    smoke = {"nodes": [8], "batch_sizes": [2], "max_tokens": 8}
    parser = option_parser(__doc__, smoke=smoke)
    add_model_option(parser, "a chat model; the shipped one if left out")
    parser.add_argument(
        "--nodes", nargs="*", type=int, default=[8, 32], help="fixed budgets to compare"
    )
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--requests-per-slot", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=96)
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
            max([ADAPTIVE_NODES, *options.nodes]),
        ),
        "max_num_seqs": max(options.batch_sizes),
    }
    llms = {}
    for key, config in speculative_configs(options.nodes).items():
        llms[key] = local_engine.start_engine(model, **limits, speculative_config=config)
        keep_kernel_overrides()
    workloads = {
        "matching": (matching, {"temperature": 0.0}),
        "random": (noise, {"temperature": 2.0}),
    }
    rows = []
    for workload, (prompts, sampling) in workloads.items():
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
    timed: dict[tuple[str, int], list[tuple[float, None]]] = {key: [] for key in llms}
    for _ in range(repeats):
        times = take_turns([serve(llm, queue, batch_size, params) for llm in llms.values()])
        for key, seconds in zip(llms, times, strict=True):
            timed[key].append((seconds, None))
    return [
        {
            "method": method,
            "nodes": nodes,
            "prompts": workload,
            "batch_size": batch_size,
            "tokens_per_s": len(queue) * params.max_tokens / median_seconds(timed[method, nodes]),
            "ratio_to_plain": median_ratio(timed["plain", 0], timed[method, nodes]),
            **counted[method, nodes],
        }
        for method, nodes in llms
    ]


def serve(
    llm: Any, queue: Prompts, batch_size: int, params: Any
) -> Generator[Progress, None, float]:
    """Answer all prompts, at most `batch_size` at a time; return the seconds of all steps.

    Yields:
        After each step.
    """
    requests = [
        (f"load-{number}", inputs, params)
        for number, inputs in enumerate(local_engine.inputs_of(queue))
    ]
    seconds, num_tokens = 0.0, 0
    for step_seconds, outputs in served(llm, requests, batch_size):
        seconds += step_seconds
        num_tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        yield Progress(seconds, num_tokens)
    return seconds


if __name__ == "__main__":
    main()
