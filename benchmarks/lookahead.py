"""Lookahead on the shipped model: the trie against independent verification, and the union of
drafters against each of its parts.

Rows of the first kind (`prompt_set` is "lookahead": the demo's prompts and those written by hand)
are means over prompts that generate `--max-tokens` tokens each, end or no end:

    plain                    vLLM without speculation
    lookahead_independent    every candidate verified in its own branch, as LADE does
    lookahead_trie           the same candidates as a trie
    lookahead_trie_likely    the trie without the nodes that are right less often than
                             `--min-probability`

`verification_tokens` are nodes that verify candidates, `window_tokens` those of the lookahead
window, and `computed_tokens` are both and the last token of every step. The independent and the
full trie accept the same tokens in every step.

Rows of the second kind, one for each prompt set and method at `--nodes` nodes, decode the prompts
to their end, at most `--max-tokens` tokens. Every run has new drafters, which know no finished
requests. `union` merges ngram_trie, lookahead and medusa; `union_product` the same with the heads
as the paper has them, which read no text (`medusa_product`); `union_two` only ngram_trie and
lookahead.

    python benchmarks/lookahead.py --json lookahead.json
    python benchmarks/lookahead.py --only union
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from _common import Row, finish, in_turns, median_seconds, option_parser

from vllm_trie.demo import engines, measure

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
PARTS = ["ngram_trie", "lookahead_trie", "medusa_dynamic"]
PRODUCT = {"joint": "product"}


class TurnTaker:
    """A drafter that hands every call to the one whose turn it is, under its node limit."""

    name = "turns"
    needs_hidden_states = True

    def __init__(self) -> None:
        self.drafter: Any = None
        self.max_nodes = 0

    @property
    def needs_node_argmax(self) -> bool:
        return self.drafter is not None and self.drafter.needs_node_argmax

    def propose(self, requests: Sequence[Any]) -> Any:
        for request in requests:
            request.max_nodes = min(request.max_nodes, self.max_nodes)
        return self.drafter.propose(requests)

    def release(self, request_id: str) -> None:
        if self.drafter is not None:
            self.drafter.release(request_id)


@dataclasses.dataclass
class Counts:
    """Sums over the verified steps of a run."""

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    window: int = 0


class Stage:
    """The engine with trees, in which the drafters take turns."""

    def __init__(self, model: str, heads: str, nodes: int, **limits: int) -> None:
        config = {
            "method": "trie_union",
            "drafters": PARTS,
            "model": heads,
            "num_speculative_tokens": nodes,
            "node_budget": "fixed",
        }
        self.llm = engines.start_engine(model, **limits, speculative_config=config)
        self._runner = engines.runner_of(self.llm)
        self._union = self._runner._guarded.drafter
        self._turns = self._runner._guarded.drafter = TurnTaker()
        self._counts = Counts()
        self._watch_steps()

    def make(
        self, method: str, options: dict[str, Any], nodes: int, cls: Any | None = None
    ) -> Callable[[], Any]:
        """What makes a new drafter for a budget of `nodes` nodes."""
        from vllm_trie.drafters import get_drafter_class, parse_options

        context = dataclasses.replace(self._union.context, num_nodes=nodes)
        medusa = self._union.parts[PARTS.index("medusa_dynamic")]

        def new() -> Any:
            drafter = (cls or get_drafter_class(method))(parse_options(method, options), context)
            for part in getattr(drafter, "parts", [drafter]):
                if part.name == "medusa_dynamic":
                    part._heads, part._temperatures = medusa._heads, medusa._temperatures
            return drafter

        return new

    def run(
        self,
        new: Callable[[], Any],
        nodes: int,
        prompts: Sequence[Sequence[int]],
        params: Any,
        batch_size: int,
    ) -> tuple[Any, Counts]:
        """Decode with a new drafter; the outputs, and what was counted."""
        drafter = self._turns.drafter = new()
        self._turns.max_nodes = nodes
        totals, self._counts = self._runner.tree_totals, Counts()
        before = totals.steps, totals.tokens
        outputs = decode(self.llm, prompts, params, batch_size)
        counts = self._counts
        counts.steps, counts.tokens = totals.steps - before[0], totals.tokens - before[1]
        if any(self._runner._guarded.failures.values()):
            raise RuntimeError(f"{drafter.name} failed: {self._runner._guarded.failures}")
        return outputs, counts

    def _watch_steps(self) -> None:
        stock = self._runner._remember_steps

        def remember(*args: Any, **kwargs: Any) -> None:
            stock(*args, **kwargs)
            sizes = getattr(self._turns.drafter, "verification_nodes", {})
            for index, request_id in enumerate(self._runner.input_batch.req_ids):
                tree = self._runner._step_trees[index].tree
                self._counts.nodes += tree.num_nodes
                if tree.num_nodes and tree.never_accept is not None:
                    candidates = sizes.get(request_id, int((~tree.never_accept).sum()))
                    self._counts.window += tree.num_nodes - candidates

        self._runner._remember_steps = remember


def decode(llm: Any, prompts: Sequence[Sequence[int]], params: Any, batch_size: int) -> Any:
    """Outputs of all prompts, `batch_size` at a time."""
    outputs = []
    for group in measure.batches(prompts, batch_size):
        some, _ = measure.generate(llm, [prompts[index] for index in group], params)
        outputs += some
    return outputs


def row_of(method: str, timed: Sequence[Any], expected: Any) -> Row:
    """A row from the repeats of a run, the counts of the first."""
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
        "identical": all(found == expected for _, (found, _) in timed),
    }


def lookahead_rows(plain: Any, stage: Stage, prompts: list[list[int]], options: Any) -> list[Row]:
    """Plain decoding, independent verification, the trie and its likely nodes."""
    from _lookahead import CountedLookahead, IndependentLookahead
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    lade = {
        "window_size": options.window_size,
        "ngram_size": options.ngram_size,
        "num_candidates": options.num_candidates,
        "pool_from_text": not options.no_text,
    }
    likely = {**lade, "min_probability": options.min_probability}
    budget = lookahead_budget(options)
    method = "lookahead_trie"
    news = {
        "lookahead_independent": stage.make(method, lade, budget, IndependentLookahead),
        "lookahead_trie": stage.make(method, lade, budget, CountedLookahead),
        "lookahead_trie_likely": stage.make(method, likely, budget, CountedLookahead),
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


def union_rows(plain: Any, stage: Stage, name: str, prompts: Any, options: Any) -> list[Row]:
    """The unions and their parts on one prompt set."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    forget = {"ngram_trie": {"store_tokens": 0}}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "ngram_trie": ("ngram_trie", engines.without_memory("ngram_trie")),
        "lookahead_trie": ("lookahead_trie", {}),
        "medusa_dynamic": ("medusa_dynamic", {}),
        "medusa_product": ("medusa_dynamic", PRODUCT),
        "union_two": ("trie_union", {"drafters": PARTS[:2], "options": forget}),
        "union": ("trie_union", {"drafters": PARTS, "options": forget}),
        "union_product": (
            "trie_union",
            {"drafters": PARTS, "options": {**forget, "medusa_dynamic": PRODUCT}},
        ),
    }
    nodes, size = options.nodes, options.union_batch_size
    expected = decode(plain, prompts, params, size)
    runs = {}
    for method, (kind, settings) in methods.items():
        new = stage.make(kind, settings, nodes)
        runs[method] = lambda new=new: stage.run(new, nodes, prompts, params, size)
    timed = in_turns(runs, options.repeats)
    rows = {method: row_of(method, repeats, expected) for method, repeats in timed.items()}
    parts = {
        "union_two": ("ngram_trie", "lookahead_trie"),
        "union": ("ngram_trie", "lookahead_trie", "medusa_dynamic"),
        "union_product": ("ngram_trie", "lookahead_trie", "medusa_product"),
    }
    for method, row in rows.items():
        row["prompt_set"], row["nodes"] = name, nodes
        if method in parts:
            best = max(rows[part]["tokens_per_step"] for part in parts[method])
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
    parser.add_argument("--min-probability", type=float, default=0.03)
    parser.add_argument("--batch-size", type=int, default=1, help="of the first kind of rows")
    parser.add_argument("--nodes", type=int, default=32, help="node budget of the union's rows")
    parser.add_argument("--union-batch-size", type=int, default=8)
    parser.add_argument(
        "--sets", nargs="*", help="prompt sets of the union's rows; all if left out"
    )
    parser.add_argument("--prompts", type=int, help="at most so many prompts of a set")
    options = parser.parse_args()
    engines.set_environment(options.verbose)
    with engines.silence(not options.verbose):
        rows = run(options)
    finish(rows, options.json, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start both engines, then measure."""
    from _lookahead import prompt_sets

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
        by_hand = ("demo", "edit", "question", "write", "continue")
        prompts = [prompt for name in by_hand for prompt in sets[name]]
        rows += lookahead_rows(plain, stage, prompts, options)
    if options.only != "lookahead":
        for name in options.sets if options.sets is not None else sets:
            rows += union_rows(plain, stage, name, sets[name], options)
    return rows


if __name__ == "__main__":
    main()
