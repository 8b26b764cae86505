"""A trained drafter, n-grams, and their union, at equal nodes.

One row for each prompt set and method:

    ngram_trie    n-grams alone
    eagle         the shipped EAGLE head alone: its chain, and its alternatives as leaves; with
                  `--method draft_model` the shipped draft model, and with `--checkpoint` another
    union         both in `trie_union`: the trained drafter rests where its passes do not pay,
                  which saves time and costs tokens per step
    union_always  the same with its passes in every step (`adaptive: false`)

All run in one engine and take turns; each run has new drafters, which know no finished requests.
`over_best_part` compares tokens per step with the better part, `speed_over_best_part` tokens in a
second of processor time with the faster one: the median over `--repeats`, with OMP_NUM_THREADS=1
also on a shared machine. `forward_calls` is the share of a batch's steps in which the trained
drafter ran, `drafting` the share of the time that drafting takes.

    python benchmarks/union.py --json union.json

On a model of your own a set holds one category of Spec-Bench's questions, as chats:

    python benchmarks/union.py --model smollm2 --checkpoint HEAD --questions question.jsonl
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from support.engines import Prompts, decode
from support.harness import (
    Row,
    add_model_option,
    finish,
    interleave,
    median_seconds,
    option_parser,
    run_quietly,
)
from support.stage import Stage

from vllm_trie.lab import local_engine

COLUMNS = (
    "set", "method", "tokens_per_step", "over_best_part", "tokens_per_s", "tokens_per_cpu_s",
    "speed_over_best_part", "drafting", "forward_calls", "identical",
)  # fmt: skip
SETS = ("edit", "write", "question", "continue", "library", "tasks", "mixed")
FORGET = {"ngram_trie": {"store_tokens": 0}}


class CountedSource:
    """A trained drafter's source that counts its calls."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.calls = 0

    def draft(self, request_ids: Sequence[str]) -> Any:
        """Draft as the source does."""
        self.calls += 1
        return self.source.draft(request_ids)


def set_rows(
    plain: Any, stage: Stage, name: str, prompts: Prompts, entry: dict[str, Any], options: Any
) -> list[Row]:
    """Measure the methods on one prompt set."""
    from vllm import SamplingParams

    from vllm_trie.drafters import get_drafter_class, parse_options

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    method = entry["method"]
    both = {"drafters": ["ngram_trie", entry], "options": FORGET}
    methods = {
        "ngram_trie": ("ngram_trie", FORGET["ngram_trie"]),
        method: ("trie_union", {"drafters": [entry]}),
        "union": ("trie_union", both),
        "union_always": ("trie_union", {**both, "adaptive": False}),
    }
    cpu_seconds: dict[str, list[float]] = {key: [] for key in methods}

    def run(key: str) -> Any:
        kind, settings = methods[key]
        context = dataclasses.replace(stage.own.context, num_nodes=options.nodes)
        drafter: Any = get_drafter_class(kind)(parse_options(kind, settings), context)
        source = CountedSource(stage.own.neural.source)
        if getattr(drafter, "neural", None) is not None:
            drafter.neural.source = source
        stage.turns.seconds.clear()
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs, counts = stage.run(drafter, options.nodes, prompts, params, options.batch_size)
        cpu_seconds[key].append(time.process_time() - cpu_start)
        drafting = sum(stage.turns.seconds) / (time.perf_counter() - start)
        return outputs, counts, drafting, source.calls / max(1, len(stage.turns.seconds))

    expected = decode(plain, prompts, params, options.batch_size)
    timed = interleave({key: lambda key=key: run(key) for key in methods}, options.repeats)
    rows = []
    for key, runs in timed.items():
        outputs, counts, drafting, calls = runs[0][1]
        num_tokens = sum(map(len, outputs))
        rows.append(
            {
                "set": name,
                "method": key,
                "tokens_per_step": num_tokens / counts.steps,
                "tokens_per_s": num_tokens / median_seconds(runs),
                "tokens_per_cpu_s": num_tokens / median(cpu_seconds[key]),
                "drafting": drafting,
                "forward_calls": calls,
                "nodes": options.nodes,
                "identical": all(result[0] == expected for _, result in runs),
            }
        )
    best = max(row["tokens_per_step"] for row in rows[:2])
    of_parts = [cpu_seconds[row["method"]] for row in rows[:2]]
    for row in rows[2:]:
        row["over_best_part"] = row["tokens_per_step"] / best - 1
        union_seconds = cpu_seconds[row["method"]]
        ratios = (
            median(a / b for a, b in zip(part, union_seconds, strict=True)) for part in of_parts
        )
        row["speed_over_best_part"] = min(ratios) - 1
    return rows


def run(options: Any) -> list[Row]:
    """Start both engines, then measure."""
    from support.prompts import chats_by_category, prompt_sets

    from vllm_trie.lab.tiny_model import draft_model_path, eagle_path, model_path

    model = options.model or str(model_path())
    shipped = {"eagle": eagle_path, "draft_model": draft_model_path}
    entry = {
        "method": options.method,
        "model": options.checkpoint or str(shipped[options.method]()),
        "num_speculative_tokens": options.length,
        "num_alternatives": options.alternatives,
    }
    if options.questions is None:
        every = prompt_sets(model)
        sets = {name: every[name][: options.prompts] for name in options.sets}
    else:
        sets = chats_by_category(model, options.questions, options.prompts or 5)
    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    limits = {
        "max_model_len": local_engine.room_for(longest, options.max_tokens, options.nodes),
        "max_num_seqs": options.batch_size,
        "dtype": options.dtype,
        # Room for the trained drafter's layers too.
        "kv_cache_memory_bytes": (160 << 20) if options.model is None else (1 << 30),
    }
    plain = local_engine.start_engine(model, **limits)
    config = {
        "method": "trie_union",
        "drafters": ["ngram_trie", entry],
        "num_speculative_tokens": options.nodes,
        "node_budget": "fixed",
    }
    stage = Stage(local_engine.start_engine(model, **limits, speculative_config=config))
    rows = []
    for name, prompts in sets.items():
        rows += set_rows(plain, stage, name, prompts, entry, options)
    return rows


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__, repeats=1)
    add_model_option(parser, "in place of the shipped one, with --checkpoint and --questions")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--method", choices=["eagle", "draft_model"], default="eagle")
    parser.add_argument("--checkpoint", help="of the trained drafter; the shipped one if left out")
    parser.add_argument("--length", type=int, default=4, help="of the chain")
    parser.add_argument("--alternatives", type=int, default=2, help="next to each of its tokens")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--prompts", type=int, help="largest number of prompts of a set")
    options = parser.parse_args()
    if options.model and not (options.checkpoint and options.questions):
        parser.error("--model needs --checkpoint, a drafter for it, and --questions")
    finish(run_quietly(run, options), options.json, COLUMNS)


if __name__ == "__main__":
    main()
