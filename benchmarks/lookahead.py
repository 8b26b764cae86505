"""Lookahead on the shipped model: against independent verification, and in a union of drafters.

Rows of the first kind (`prompt_set` is "lookahead": the demo's prompts and those written by hand,
or `--sets`) are means over prompts that generate exactly `--max-tokens` tokens each:

    plain                    vLLM without speculation
    lookahead_independent    every candidate verified in its own branch, as LADE does
    lookahead_trie_all       the same candidates as a trie, all of them
    lookahead_trie           the trie without its unlikely nodes, the method's default;
                             `--min-probability` sets another threshold
    max_candidate_depth_D    the trie of all candidates down to depth D, for each value given
    max_candidate_nodes_B    its B likeliest nodes

`verification_tokens` are nodes that verify candidates, `window_tokens` nodes of the lookahead
window, and `computed_tokens` are both and the last token of every step. `saved` compares with
independent verification, which accepts the same tokens in every step as the trie of all candidates.

Rows of the second kind, one for each prompt set and method at `--nodes` nodes, decode the prompts
to their end, at most `--max-tokens` tokens. Every run has new drafters, which know no finished
requests. `union` merges ngram_trie and medusa. `union_product` does the same with the heads as the
paper has them, which read no text (`medusa_product`).

    python benchmarks/lookahead.py --json lookahead.json
    python benchmarks/lookahead.py --only union

With `--model` the demo's prompts run on another model, for rows of the first kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from support.engines import Prompts, decode
from support.harness import (
    Row,
    Timed,
    finish,
    interleave,
    median_seconds,
    option_parser,
    run_quietly,
)
from support.stage import Counts, Stage

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "prompt_set", "steps", "verification_tokens", "computed_tokens", "tokens_per_step",
    "tokens_per_s", "ratio_to_plain", "saved", "over_best_part", "identical",
)  # fmt: skip
BY_HAND = ("demo", "edit", "question", "write", "continue")
PARTS = ["ngram_trie", "medusa_dynamic"]
"""Drafters that the engine is started with."""
PRODUCT = {"joint": "product"}
FORGET = {"ngram_trie": {"store_tokens": 0}}
UNION_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram_trie": ("ngram_trie", FORGET["ngram_trie"]),
    "medusa_dynamic": ("medusa_dynamic", {}),
    "medusa_product": ("medusa_dynamic", PRODUCT),
    "union": ("trie_union", {"drafters": PARTS, "options": FORGET}),
    "union_product": (
        "trie_union",
        {"drafters": PARTS, "options": {**FORGET, "medusa_dynamic": PRODUCT}},
    ),
}
"""Name in the table -> method and its options."""
UNION_PARTS = {
    "union": ("ngram_trie", "medusa_dynamic"),
    "union_product": ("ngram_trie", "medusa_product"),
}


def new_drafter(
    stage: Stage, method: str, options: dict[str, Any], nodes: int, cls: Any = None
) -> Any:
    """Make a drafter for a budget of `nodes` nodes, with the engine's own Medusa heads."""
    from vllm_trie.drafters import get_drafter_class, parse_options

    context = dataclasses.replace(stage.own.context, num_nodes=nodes)
    drafter = (cls or get_drafter_class(method))(parse_options(method, options), context)
    for part in getattr(drafter, "parts", [drafter]):
        if part.name == "medusa_dynamic":
            medusa = stage.own.parts[PARTS.index("medusa_dynamic")]
            part.set_heads(medusa.heads, medusa.temperatures)
    return drafter


def row_of(method: str, timed: Timed, expected: list[list[int]]) -> Row:
    """Return a row from the repeats of a run, with the counts of the first."""
    outputs, counts = timed[0][1]
    num_tokens = sum(map(len, outputs))
    return {
        "method": method,
        "generated_tokens": num_tokens,
        "steps": counts.steps,
        "verification_tokens": counts.nodes - counts.window,
        "window_tokens": counts.window,
        "computed_tokens": counts.steps + counts.nodes,
        "tokens_per_step": num_tokens / counts.steps,
        "tokens_per_s": num_tokens / median_seconds(timed),
        "identical": all(answers == expected for _, (answers, _) in timed),
    }


def lookahead_rows(plain: Any, stage: Stage, prompts: Prompts, options: Any) -> list[Row]:
    """Measure plain decoding, independent verification and the tries of candidates."""
    from support.lookahead import CountedLookahead, IndependentLookahead
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    likely = {
        "window_size": options.window_size,
        "ngram_size": options.ngram_size,
        "num_candidates": options.num_candidates,
        "pool_from_text": not options.no_text,
    }
    every = {**likely, "min_probability": 0.0}
    if options.min_probability is not None:
        likely["min_probability"] = options.min_probability
    budget, size = lookahead_budget(options), options.batch_size

    def run_plain() -> Any:
        outputs = decode(plain, prompts, params, size)
        return outputs, Counts(steps=sum(map(len, outputs)))

    def run(cls: Any, settings: dict[str, Any]) -> Any:
        drafter = new_drafter(stage, "lookahead_trie", settings, budget, cls)
        return stage.run(drafter, budget, prompts, params, size)

    runs: dict[str, Callable[[], Any]] = {
        "plain": run_plain,
        "lookahead_independent": lambda: run(IndependentLookahead, every),
        "lookahead_trie_all": lambda: run(CountedLookahead, every),
        "lookahead_trie": lambda: run(CountedLookahead, likely),
    }
    for key in ("max_candidate_depth", "max_candidate_nodes"):
        for limit in getattr(options, key):
            settings = {**every, key: limit}
            runs[f"{key}_{limit}"] = partial(run, CountedLookahead, settings)
    timed = interleave(runs, options.repeats)
    expected = timed["plain"][0][1][0]
    rows = {method: row_of(method, timed_runs, expected) for method, timed_runs in timed.items()}
    independent = rows["lookahead_independent"]["verification_tokens"]
    plain_speed = rows["plain"]["tokens_per_s"]
    for row in rows.values():
        row["prompt_set"], row["nodes"] = "lookahead", budget
        row["ratio_to_plain"] = row["tokens_per_s"] / plain_speed
        row["saved"] = 1 - row["verification_tokens"] / independent
        for key in ["steps", *(key for key in row if key.endswith("_tokens"))]:
            row[key] /= len(prompts)
    rows["plain"]["saved"] = None
    return list(rows.values())


def lookahead_budget(options: Any) -> int:
    """Return the number of nodes for the whole window and all candidates."""
    from vllm_trie.drafters.lookahead.options import window_nodes

    candidates = options.num_candidates * (options.ngram_size - 1)
    return window_nodes(options.window_size, options.ngram_size) + candidates


def union_rows(plain: Any, stage: Stage, name: str, prompts: Prompts, options: Any) -> list[Row]:
    """Measure the unions and their parts on one prompt set."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    nodes, size = options.nodes, options.union_batch_size

    def run(method: str, settings: dict[str, Any]) -> Any:
        drafter = new_drafter(stage, method, settings, nodes)
        return stage.run(drafter, nodes, prompts, params, size)

    runs = {key: lambda value=value: run(*value) for key, value in UNION_METHODS.items()}
    expected = decode(plain, prompts, params, size)
    timed = interleave(runs, options.repeats)
    rows = {method: row_of(method, timed_runs, expected) for method, timed_runs in timed.items()}
    for method, row in rows.items():
        row["prompt_set"], row["nodes"] = name, nodes
        if method in UNION_PARTS:
            best = max(rows[part]["tokens_per_step"] for part in UNION_PARTS[method])
            row["over_best_part"] = row["tokens_per_step"] / best - 1
    return list(rows.values())


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    parser.add_argument("--only", choices=["lookahead", "union"], help="one kind of rows")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--window-size", type=int, default=10, help="W")
    parser.add_argument("--ngram-size", type=int, default=5, help="L")
    parser.add_argument("--num-candidates", type=int, default=5, help="N")
    parser.add_argument("--no-text", action="store_true", help="only n-grams of the window")
    parser.add_argument(
        "--min-probability", type=float, help="of lookahead_trie; its default if left out"
    )
    for name, letter in (("--max-candidate-depth", "D"), ("--max-candidate-nodes", "B")):
        parser.add_argument(name, nargs="+", type=int, default=[], metavar=letter, help="see above")
    parser.add_argument("--model", help="see above; the shipped one if left out")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch-size", type=int, default=1, help="of the first kind of rows")
    parser.add_argument("--nodes", type=int, default=32, help="node budget of the union's rows")
    parser.add_argument("--union-batch-size", type=int, default=8)
    parser.add_argument(
        "--sets",
        nargs="+",
        help="prompt sets; if left out, the demo's and those written by hand for the first kind of "
        "rows, and all for the second",
    )
    parser.add_argument("--prompts", type=int, help="largest number of prompts of a set")
    options = parser.parse_args()
    finish(run_quietly(run, options), options.json, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start both engines, then measure."""
    from support.prompts import demo_chats, prompt_sets

    from vllm_trie.lab.tiny_model import medusa_path, model_path

    model = options.model or str(model_path())
    if options.model is None:
        sets, parts = prompt_sets(model), PARTS
    else:  # the shipped heads and most prompt sets belong to the shipped model
        sets, parts = {"demo": list(demo_chats(model).values())}, PARTS[:1]
        options.only, options.sets = "lookahead", ["demo"]
    sets = {name: prompts[: options.prompts] for name, prompts in sets.items()}
    budget = max(lookahead_budget(options), options.nodes)
    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    limits = {
        "max_model_len": local_engine.room_for(longest, options.max_tokens, budget),
        "max_num_seqs": max(options.batch_size, options.union_batch_size),
        "dtype": options.dtype,
    }
    plain = local_engine.start_engine(model, **limits)
    config = {
        "method": "trie_union",
        "drafters": parts,
        **({"model": str(medusa_path())} if parts == PARTS else {}),
        "num_speculative_tokens": budget,
        "node_budget": "fixed",
    }
    stage = Stage(local_engine.start_engine(model, **limits, speculative_config=config))
    rows = []
    if options.only != "union":
        prompts = [prompt for name in options.sets or BY_HAND for prompt in sets[name]]
        rows += lookahead_rows(plain, stage, prompts, options)
    if options.only != "lookahead":
        for name in options.sets or sets:
            rows += union_rows(plain, stage, name, sets[name], options)
    return rows


if __name__ == "__main__":
    main()
