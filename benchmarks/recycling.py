"""Tokens per step with and without recycled successors, by kind of prompt.

Each row decodes one set of prompts with `ngram_trie`, its store and a fixed number of nodes. One
engine serves all rows: its drafter is made anew for each number of nodes, temperature and choice of
`recycle`, and sets follow one another, so that later ones find what earlier ones left in the store
and in the table of recycled successors. Tokens per step are exact: they do not depend on the
machine or its load.

    python benchmarks/recycling.py --json recycling.json
    python benchmarks/recycling.py --model smollm2 --questions question.jsonl --per-category 5

With `--questions` the sets are Spec-Bench's categories, as chats of `--model`.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from support.harness import Row, add_model_option, option_parser, report_quietly
from support.replay_data import SMOKE_FILES
from support.stage import Stage

from vllm_trie.lab import local_engine

COLUMNS = ("set", "nodes", "recycle", "temperature", "tokens_per_step", "ratio")
BATCH_SIZE = 4


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__, smoke={**SMOKE_FILES, "nodes": [8], "max_tokens": 8})
    add_model_option(parser, "in place of the shipped one")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's file")
    parser.add_argument("--per-category", type=int, default=5, help="of Spec-Bench's questions")
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


def prompts_by_set(model: str, options: Any) -> dict[str, list[list[int]]]:
    """Return the prompts that are decoded."""
    from support.prompts import chats_by_category, prompt_sets

    if options.questions is None:
        # The parameters were chosen on the other half of the prompts.
        return {name: chosen[1::2] for name, chosen in prompt_sets(model).items()}
    return chats_by_category(model, options.questions, options.per_category)


def run(options: Any) -> list[Row]:
    """Return a row for each set, number of nodes and temperature, with and without `recycle`."""
    from vllm import SamplingParams

    from vllm_trie.drafts import get_drafter_class, parse_options
    from vllm_trie.lab.tiny_model import model_path

    model = options.model or str(model_path())
    sets = prompts_by_set(model, options)
    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    most = max(options.nodes)
    llm = local_engine.start_engine(
        model,
        max_model_len=local_engine.room_for(longest, options.max_tokens, most),
        max_num_seqs=BATCH_SIZE,
        dtype=options.dtype,
        speculative_config={
            "method": "ngram_trie",
            "num_speculative_tokens": most,
            "node_budget": "fixed",
            "verification": "tree",
        },
    )
    stage = Stage(llm)
    rows = []
    for nodes, temperature in itertools.product(options.nodes, options.temperatures):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=options.max_tokens,
            seed=0 if temperature else None,
        )
        without: list[float] = []
        for recycle in (False, True):
            context = dataclasses.replace(stage.first_drafter.context, num_nodes=nodes)
            drafter = get_drafter_class("ngram_trie")(
                parse_options("ngram_trie", {"recycle": recycle}), context
            )
            rates = []
            for prompts in sets.values():
                _, counts = stage.run(drafter, nodes, prompts, params, BATCH_SIZE)
                rates.append(counts.tokens / counts.steps)
            without = without or rates
            rows += [
                {
                    "set": name, "nodes": nodes, "recycle": recycle, "temperature": temperature,
                    "tokens_per_step": rate, "ratio": rate / before,
                }
                for name, rate, before in zip(
                    [*sets, "mean"], [*rates, _mean(rates)], [*without, _mean(without)], strict=True
                )
            ]  # fmt: skip
    return rows


def _mean(rates: list[float]) -> float:
    return sum(rates) / len(rates)


if __name__ == "__main__":
    main()
