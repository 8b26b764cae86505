"""Tokens per step with and without recycled successors, by kind of prompt.

Each row decodes one set of prompts with `ngram_trie` and a fixed number of nodes; sets follow one
another in one engine, so later ones find what earlier ones left in the store and in the table of
recycled successors. Tokens per step are exact: they do not depend on the machine or its load.

    python benchmarks/recycling.py --json recycling.json
"""

from __future__ import annotations

from typing import Any

from support.engines import count_steps
from support.harness import Row, finish, option_parser, run_quietly

from vllm_trie import local_engine

COLUMNS = ("set", "nodes", "store", "recycle", "temperature", "tokens_per_step", "ratio")
BATCH_SIZE = 4


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0])
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument(
        "--half", type=int, choices=(0, 1), default=1,
        help="every other prompt of each set; the parameters were chosen on half 0",
    )  # fmt: skip
    options = parser.parse_args()
    finish(run_quietly(run, options), options.json, COLUMNS)


def run(options: Any) -> list[Row]:
    """Return a row for each set, number of nodes, temperature, and switch of the two sources."""
    from support.prompts import prompt_sets

    from vllm_trie.tiny_model import model_path

    model = str(model_path())
    sets = {name: found[options.half :: 2] for name, found in prompt_sets(model).items()}
    del sets["mixed"]
    rows = []
    for nodes in options.nodes:
        for temperature in options.temperatures:
            for store in (True, False):
                off, on = (
                    measure(model, sets, nodes, store, recycle, temperature, options.max_tokens)
                    for recycle in (False, True)
                )
                rows += [{**row, "ratio": 1.0} for row in off]
                rows += [
                    {**row, "ratio": row["tokens_per_step"] / other["tokens_per_step"]}
                    for row, other in zip(on, off, strict=True)
                ]
    return rows


def measure(
    model: str,
    sets: dict[str, list[list[int]]],
    nodes: int,
    store: bool,
    recycle: bool,
    temperature: float,
    max_tokens: int,
) -> list[Row]:
    """Return the rows of one engine."""
    from vllm import SamplingParams

    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    config = {
        "method": "ngram_trie",
        "num_speculative_tokens": nodes,
        "node_budget": "fixed",
        "recycle": recycle,
        **({} if store else {"store_tokens": 0}),
    }
    llm = local_engine.start_engine(
        model,
        max_model_len=local_engine.room_for(longest, max_tokens, nodes),
        max_num_seqs=BATCH_SIZE,
        speculative_config=config,
    )
    seed = 0 if temperature else None
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    same = {"nodes": nodes, "store": store, "recycle": recycle, "temperature": temperature}
    return [
        {
            "set": name,
            **same,
            "tokens_per_step": count_steps(llm, prompts, params, BATCH_SIZE)["tokens_per_step"],
        }
        for name, prompts in sets.items()
    ]


if __name__ == "__main__":
    main()
