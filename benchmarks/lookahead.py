"""Lookahead on the shipped model: the trie against independent verification, and the union of
drafters against each of its parts.

Rows of the first kind (`prompt_set` is "lookahead": the demo's prompts and those written by hand,
or `--sets`) are means over prompts that generate `--max-tokens` tokens each, end or no end:

    plain                    vLLM without speculation
    lookahead_independent    every candidate verified in its own branch, as LADE does
    lookahead_trie_all       the same candidates as a trie, all of them
    lookahead_trie           the trie without its unlikely nodes, as the method does by default; at
                             another threshold with `--min-probability`

`verification_tokens` are nodes that verify candidates, `window_tokens` those of the lookahead
window, and `computed_tokens` are both and the last token of every step. `saved` is against
independent verification. That and the trie of all candidates accept the same tokens in every step.

Rows of the second kind, one for each prompt set and method at `--nodes` nodes, decode the prompts
to their end, at most `--max-tokens` tokens. Every run has new drafters, which know no finished
requests. `union` merges ngram_trie, lookahead and medusa; `union_product` the same with the heads
as the paper has them, which read no text (`medusa_product`); `union_two` only ngram_trie and
lookahead.

    python benchmarks/lookahead.py --json lookahead.json
    python benchmarks/lookahead.py --only union
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _common import Row, finish, in_turns, option_parser
from _lookahead_stage import Counts, Stage, decode, row_of

from vllm_trie.demo import engines

COLUMNS = (
    "method",
    "prompt_set",
    "steps",
    "verification_tokens",
    "computed_tokens",
    "tokens_per_step",
    "tokens_per_s",
    "ratio_to_plain",
    "saved",
    "over_best_part",
    "identical",
)
BY_HAND = ("demo", "edit", "question", "write", "continue")


def lookahead_rows(plain: Any, stage: Stage, prompts: list[list[int]], options: Any) -> list[Row]:
    """Plain decoding, independent verification, the trie of all candidates and of the likely."""
    from _lookahead import CountedLookahead, IndependentLookahead
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
    budget = lookahead_budget(options)
    method = "lookahead_trie"
    news = {
        "lookahead_independent": stage.make(method, every, budget, IndependentLookahead),
        "lookahead_trie_all": stage.make(method, every, budget, CountedLookahead),
        "lookahead_trie": stage.make(method, likely, budget, CountedLookahead),
    }
    size = options.batch_size
    runs: dict[str, Callable[[], Any]] = {
        "plain": lambda: (decode(plain, prompts, params, size), Counts())
    }
    for name, new in news.items():
        runs[name] = lambda new=new: stage.run(new, budget, prompts, params, size)
    timed = in_turns(runs, options.repeats)
    expected = timed["plain"][0][1][0]
    timed["plain"][0][1][1].steps = sum(map(len, expected))
    rows = [row_of(name, repeats, expected) for name, repeats in timed.items()]
    independent = rows[1]["verification_tokens"]
    for row in rows:
        row["prompt_set"], row["nodes"] = "lookahead", budget
        row["ratio_to_plain"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        row["saved"] = 1 - row["verification_tokens"] / independent
        for key in ["steps", *(key for key in row if key.endswith("_tokens"))]:
            row[key] /= len(prompts)
    rows[0]["saved"] = None
    return rows


def lookahead_budget(options: Any) -> int:
    """Nodes for the whole window and all candidates."""
    from vllm_trie.drafters.lookahead.options import window_nodes

    candidates = options.num_candidates * (options.ngram_size - 1)
    return window_nodes(options.window_size, options.ngram_size) + candidates


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
    parser.add_argument("--batch-size", type=int, default=1, help="of the first kind of rows")
    parser.add_argument("--nodes", type=int, default=32, help="node budget of the union's rows")
    parser.add_argument("--union-batch-size", type=int, default=8)
    parser.add_argument(
        "--sets",
        nargs="+",
        help="prompt sets; if left out, those written by hand for the first kind of rows, and all "
        "for the second",
    )
    parser.add_argument("--prompts", type=int, help="at most so many prompts of a set")
    options = parser.parse_args()
    engines.set_environment(options.verbose)
    with engines.silence(not options.verbose):
        rows = run(options)
    columns = [column for column in COLUMNS if any(row.get(column) is not None for row in rows)]
    if options.only == "lookahead":
        columns.remove("prompt_set")  # leaves room for the methods' names
    finish(rows, options.json, columns)


def run(options: Any) -> list[Row]:
    """Start both engines, then measure."""
    from _lookahead import prompt_sets
    from _lookahead_union import union_rows

    from vllm_trie.tiny_model import medusa_path, model_path

    model = str(model_path())
    sets = {name: prompts[: options.prompts] for name, prompts in prompt_sets(model).items()}
    budget = max(lookahead_budget(options), options.nodes)
    longest = max(len(prompt) for prompts in sets.values() for prompt in prompts)
    limits = {
        "max_model_len": engines.room_for(longest, options.max_tokens, budget),
        "max_num_seqs": max(options.batch_size, options.union_batch_size),
    }
    plain = engines.start_engine(model, **limits)
    stage = Stage(model, str(medusa_path()), budget, **limits)
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
