"""Medusa drafting on held-out text: chain, fixed trees and dynamic trees with the same node count.

One engine decodes greedily; the methods take turns in it, so that all see the same minutes of the
machine. The prompts are task documents from modules that neither the model nor the heads saw, and
prompts written by hand. All nodes are verified; `tokens_per_step` counts tokens for each
verification of a request.

    chain        the heads' likeliest tokens
    fixed        Medusa's published tree, its first n nodes
    dynamic      the best paths by the product of the heads' probabilities, as in the paper
    dynamic_calibrated  the same with the temperatures that the checkpoint has for each head
    context      the same depth, with probabilities corrected by the request's own text
    context_deep the default of `medusa_dynamic`: as deep as the text supports
    ngram_trie   the request's text alone
    union        `trie_union` of the two: ngram_trie and the default of `medusa_dynamic`

With `--questions`, first turns of Spec-Bench's questions as chats of `--model` take the prompts'
place. In bfloat16 near-ties make answers differ; `ratio_to_plain` compares tokens per second.

    python benchmarks/medusa.py --model smollm2 --dtype bfloat16 --questions Q.jsonl
    python benchmarks/medusa.py --model MODEL --heads HEADS --dtype bfloat16 --questions Q.jsonl

    python benchmarks/medusa.py --json medusa.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from support.engines import decode
from support.harness import (
    Row,
    Timed,
    add_model_option,
    interleave,
    option_parser,
    report_quietly,
)
from support.stage import Stage

from vllm_trie.lab import local_engine

COLUMNS = (
    "method", "nodes", "batch_size", "nodes_per_step", "tokens_per_step", "ratio_to_fixed",
    "tokens_per_s", "ratio_to_plain", "draft_ms", "model_ms", "draft_over_model",
    "predicted_over_accepted", "identical",
)  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "chain": {"paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]},
    "fixed": {},
    "dynamic": {"joint": "product", "calibrate": False},
    "dynamic_calibrated": {"joint": "product"},
    "context": {"joint": "context", "max_depth": 4},
    "context_deep": {"joint": "context"},
    "ngram_trie": {"store_tokens": 0},
    "union": {
        "drafters": ["ngram_trie", "medusa_dynamic"],
        "options": {"ngram_trie": {"store_tokens": 0}},
    },
}
_DRAFTERS = {"ngram_trie": "ngram_trie", "union": "trie_union"}
"""Those of the methods that are not `medusa_dynamic`, but for fixed trees."""
_FIXED = ("chain", "fixed")
_Run = tuple[str, int]
"""A method and its nodes."""


def time_model(runner: Any) -> list[float]:
    """Return a list that grows by the seconds of each forward pass of the model."""
    seen: list[float] = []
    stock = runner.execute_model

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = stock(*args, **kwargs)
        seen.append(time.perf_counter() - start)
        return output

    runner.execute_model = execute_model
    return seen


def new_drafter(first: Any, method: str, options: dict[str, Any]) -> Any:
    """Make another drafter, with the heads of the engine's own."""
    from support.fixed_trees import FixedTreeDrafter, FixedTreeOptions

    from vllm_trie.drafts import get_drafter_class, parse_options
    from vllm_trie.extras.heads import MedusaDrafter

    if method in _FIXED:
        drafter: Any = FixedTreeDrafter(FixedTreeOptions.model_validate(options), first.context)
    else:
        name = _DRAFTERS.get(method, "medusa_dynamic")
        drafter = get_drafter_class(name)(parse_options(name, options), first.context)
    for owner in (drafter, getattr(drafter, "heads", None)):
        if isinstance(owner, MedusaDrafter):
            owner.set_heads(first.heads, first.temperatures)
    return drafter


def compare(options: Any) -> list[Row]:
    """Measure all methods at all node counts on one model."""
    from vllm import SamplingParams

    from vllm_trie.lab import smollm2, tiny_model

    model = options.model or str(tiny_model.model_path())
    heads = options.heads or str(tiny_model.medusa_path())
    if options.model and not options.heads:
        if not Path(options.model).name.startswith(smollm2.NAME):
            raise SystemExit("--model: name the model's Medusa heads with --heads")
        heads = str(smollm2.medusa_path())
    prompts = choose_prompts(model, options)
    budget, size = max(options.nodes), options.batch_size
    llm = local_engine.start_engine(
        model,
        max_model_len=local_engine.room_for(max(map(len, prompts)), options.max_tokens, budget),
        max_num_seqs=max(8, size),
        dtype=options.dtype,
        speculative_config={
            "method": "medusa_dynamic",
            "model": heads,
            "num_speculative_tokens": budget,
            "node_budget": "fixed",
        },
    )
    stage = Stage(llm)
    turns = stage.turns
    model_seconds = time_model(local_engine.runner_of(llm))
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, detokenize=False)
    plain = decode(llm, prompts, params, size)

    def measured(drafter: Any, nodes: int) -> tuple[list[list[int]], Row]:
        turns.predicted = 0.0
        turns.seconds.clear()
        model_seconds.clear()
        outputs, counts = stage.run(drafter, nodes, prompts, params, size)
        accepted = max(1, counts.tokens - counts.steps)
        return outputs, {
            "tokens_per_step": counts.tokens / counts.steps,
            "nodes_per_step": counts.nodes / counts.steps,
            "model_ms": 1e3 * median(model_seconds),
            "predicted_over_accepted": turns.predicted / accepted,
            "draft_ms": 1e3 * median(turns.seconds or [0.0]),
        }

    runs: dict[_Run, Callable[[], Any]] = {("plain", 0): lambda: measured(None, 0)}
    for nodes, method in product(options.nodes, options.methods):
        drafter = new_drafter(stage.first_drafter, method, METHODS[method])
        runs[method, nodes] = partial(measured, drafter, nodes)
    return method_rows(interleave(runs, options.repeats), plain, size)


def choose_prompts(model: str, options: Any) -> list[list[int]]:
    """Return the prompts that all methods answer."""
    from support.prompts import chats_by_category, code_prompts

    if options.questions is None:
        prompts = [prompt for group in code_prompts(model).values() for prompt in group]
        return prompts[: options.prompts]
    by_category = chats_by_category(model, options.questions, options.questions_per_category)
    return [prompt for prompts in by_category.values() for prompt in prompts]


def method_rows(timed: dict[_Run, Timed], plain: list[list[int]], batch_size: int) -> list[Row]:
    """Return a row for each run.

    Args:
        timed: each run returned its outputs and figures.
        plain: outputs of plain decoding.
        batch_size: requests at a time.
    """
    plain_speed = _tokens_per_s(timed["plain", 0])
    rows = {}
    for key, repeats in timed.items():
        method, nodes = key
        speed = _tokens_per_s(repeats)
        times = [row for _, (_, row) in repeats]
        row = rows[key] = {
            "method": method,
            "nodes": nodes,
            "batch_size": batch_size,
            "nodes_per_step": times[0]["nodes_per_step"],
            "tokens_per_step": times[0]["tokens_per_step"],
            "tokens_per_s": speed,
            "ratio_to_plain": speed / plain_speed,
            "model_ms": median(turn["model_ms"] for turn in times),
            "draft_ms": median(turn["draft_ms"] for turn in times),
            "identical": all(outputs == plain for _, (outputs, _) in repeats),
        }
        if method == "plain":
            continue
        row["draft_over_model"] = row["draft_ms"] / row["model_ms"]
        row["predicted_over_accepted"] = times[0]["predicted_over_accepted"]
    for (_, nodes), row in rows.items():
        if fixed := rows.get(("fixed", nodes)):
            row["ratio_to_fixed"] = row["tokens_per_step"] / fixed["tokens_per_step"]
    return list(rows.values())


def _tokens_per_s(repeats: Timed) -> float:
    return median(sum(map(len, outputs)) / seconds for seconds, (outputs, _) in repeats)


def main() -> None:
    """Measure and print."""
    smoke = {"nodes": [8], "max_tokens": 8, "prompts": 2}
    parser = option_parser(__doc__, smoke=smoke)
    add_model_option(parser, "folder of a model; the shipped one if left out")
    parser.add_argument("--heads", help="its Medusa heads; without it those that ship")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--questions", type=Path, help="Spec-Bench's questions; see above")
    parser.add_argument("--questions-per-category", type=int, default=4)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=None, help="use only the first prompts")
    options = parser.parse_args()
    report_quietly(compare, options, COLUMNS)


if __name__ == "__main__":
    main()
