"""Lookahead on the shipped model, against independent verification.

Rows are means over the demo's prompts and those written by hand, or `--sets`, which generate
exactly `--max-tokens` tokens each:

    plain                    vLLM without speculation
    lookahead_independent    every candidate verified in its own branch, as LADE does
    lookahead_trie_all       the same candidates as a trie, all of them
    lookahead_trie           the trie without its unlikely nodes, the method's default
    max_candidate_depth_D    the trie of all candidates down to depth D, for each value given
    max_candidate_nodes_B    its B likeliest nodes

`verification_tokens` are nodes that verify candidates, `window_tokens` nodes of the lookahead
window, and `computed_tokens` are both and the last token of every step. `saved` compares with
independent verification, which accepts the same tokens in every step as the trie of all candidates.

    python benchmarks/lookahead.py --json lookahead.json

With `--model` the demo's prompts run on another model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from support.engines import Prompts, decode
from support.harness import (
    Row,
    Timed,
    add_model_option,
    interleave,
    median_seconds,
    option_parser,
    report_quietly,
)
from support.stage import Counts, Stage

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "steps", "verification_tokens", "computed_tokens", "tokens_per_step",
    "tokens_per_s", "ratio_to_plain", "saved", "identical",
)  # fmt: skip
BY_HAND = ("demo", "edit", "question", "write", "continue")


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


def measure(plain: Any, stage: Stage, prompts: Prompts, options: Any) -> list[Row]:
    """Measure plain decoding, independent verification and the tries of candidates."""
    from support.lookahead import CountedLookahead, IndependentLookahead
    from vllm import SamplingParams

    from vllm_trie.drafts import parse_options

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    likely = {
        "window_size": options.window_size,
        "ngram_size": options.ngram_size,
        "num_candidates": options.num_candidates,
    }
    every = {**likely, "min_probability": 0.0}
    budget, size = lookahead_budget(options), options.batch_size

    def run_plain() -> Any:
        outputs = decode(plain, prompts, params, size)
        return outputs, Counts(steps=sum(map(len, outputs)))

    def run(cls: Any, settings: dict[str, Any]) -> Any:
        drafter = cls(parse_options("lookahead_trie", settings), stage.first_drafter.context)
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
        row["nodes"] = budget
        row["ratio_to_plain"] = row["tokens_per_s"] / plain_speed
        row["saved"] = 1 - row["verification_tokens"] / independent
        for key in ["steps", *(key for key in row if key.endswith("_tokens"))]:
            row[key] /= len(prompts)
    rows["plain"]["saved"] = None
    return list(rows.values())


def lookahead_budget(options: Any) -> int:
    """Return the number of nodes for the whole window and all candidates."""
    from vllm_trie.extras.lookahead.options import window_nodes

    candidates = options.num_candidates * (options.ngram_size - 1)
    return window_nodes(options.window_size, options.ngram_size) + candidates


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__, smoke={"sets": ["demo"], "prompts": 1, "max_tokens": 8})
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--window-size", type=int, default=10, help="W")
    parser.add_argument("--ngram-size", type=int, default=5, help="L")
    parser.add_argument("--num-candidates", type=int, default=5, help="N")
    for name, letter in (("--max-candidate-depth", "D"), ("--max-candidate-nodes", "B")):
        parser.add_argument(name, nargs="+", type=int, default=[], metavar=letter, help="see above")
    add_model_option(parser, "in place of the shipped one")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=list(BY_HAND), help="prompt sets")
    parser.add_argument("--prompts", type=int, help="largest number of prompts of a set")
    options = parser.parse_args()
    report_quietly(run, options, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start both engines, then measure."""
    from support.prompts import demo_chats, prompt_sets

    from vllm_trie.lab.tiny_model import model_path

    if options.model is None:
        model = str(model_path())
        sets = prompt_sets(model)
        chosen = [prompt for name in options.sets for prompt in sets[name][: options.prompts]]
    else:  # most prompt sets belong to the shipped model
        model = options.model
        chosen = list(demo_chats(model).values())[: options.prompts]
    budget = lookahead_budget(options)
    limits = {
        "max_model_len": local_engine.room_for(max(map(len, chosen)), options.max_tokens, budget),
        "max_num_seqs": options.batch_size,
        "dtype": options.dtype,
    }
    plain = local_engine.start_engine(model, **limits)
    config = {
        "method": "lookahead_trie",
        "num_speculative_tokens": budget,
        "node_budget": "fixed",
    }
    stage = Stage(local_engine.start_engine(model, **limits, speculative_config=config))
    return measure(plain, stage, chosen, options)


if __name__ == "__main__":
    main()
