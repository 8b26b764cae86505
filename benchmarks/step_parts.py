"""The time of a decoding step by part, over the length of the context and the number of nodes.

One request at a time on one engine, whose trees have exactly the nodes of their row: random trees
with a part of the right answer. 0 nodes is plain decoding. `attention` is a part of `forward`;
`other` is what no column names: scheduler, input preparation, output handling.

    python benchmarks/step_parts.py --model smollm2 --dtype bfloat16 --questions question.jsonl
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from support.harness import Row, add_model_option, finish, option_parser

from vllm_trie.lab import local_engine

PARTS = (
    "forward", "attention", "logits", "sampling", "drafting", "preparation", "bookkeeping",
)  # fmt: skip
COLUMNS = ("context", "nodes", "step_ms", "ratio_to_plain", *PARTS, "other", "tokens_per_step")
METHOD = "full_trees"


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    add_model_option(parser, "in place of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--questions", type=Path, required=True, help="Spec-Bench's, whose text fills the contexts"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", nargs="+", type=int, default=[100, 500, 1500])
    parser.add_argument("--nodes", nargs="+", type=int, default=[0, 1, 4, 8, 16, 32])
    parser.add_argument("--max-tokens", type=int, default=32, help="output of a request")
    parser.add_argument("--eager", action="store_true", help="run the model without compilation")
    options = parser.parse_args()
    local_engine.set_environment(options.verbose, local_engine.with_all_cores())
    with local_engine.silence(not options.verbose):
        rows = run(options)
    finish(rows, options.json, COLUMNS)


def run(options: Any) -> list[Row]:
    """Return a row for each length of the context and number of nodes."""
    from support.full_trees import FullTreesDrafter
    from support.peers_engines import METHODS, Contestant, Question
    from support.prompts import spec_bench_chats
    from support.stage import Turns

    from vllm_trie.drafters import register
    from vllm_trie.lab import smollm2

    model = options.model or smollm2.model_folder(smollm2.NAME)
    chats = spec_bench_chats(model, options.questions)
    text = [token for chat in chats for token in chat.prompt]
    register(FullTreesDrafter)
    most = max(options.nodes)
    METHODS[METHOD] = {
        "method": METHOD,
        "num_speculative_tokens": most,
        "node_budget": "fixed",
    }
    contestant = Contestant(
        METHOD,
        model,
        dtype=options.dtype,
        enforce_eager=options.eager,
        enable_prefix_caching=False,
        max_model_len=local_engine.room_for(max(options.contexts), options.max_tokens, most),
    )
    parts = _StepParts(contestant)
    trees = local_engine.trees_of(contestant.llm)
    drafter, turns = trees.guard.drafter, Turns()
    trees.guard.drafter = turns
    questions = [
        Question("", text[:length], None, options.max_tokens) for length in options.contexts
    ]
    for question in questions:  # also warms up
        answer = contestant.run(question).output
        FullTreesDrafter.answers[tuple(question.prompt)] = answer
    measured = defaultdict(list)
    for _ in range(options.repeats):
        for question in questions:
            for nodes in options.nodes:
                turns.drafter, turns.max_nodes = drafter if nodes else None, nodes
                measured[len(question.prompt), nodes].append(parts.run(question))
    rows: list[Row] = []
    for (context, nodes), runs in measured.items():
        steps = sum(run["steps"] for run in runs)
        mean = {part: 1e3 * sum(run[part] for run in runs) / steps for part in ("step_ms", *PARTS)}
        plain = next((row for row in rows if row["context"] == context), mean)
        named = sum(mean[part] for part in PARTS if part != "attention")
        rows.append(
            {
                "context": context,
                "nodes": nodes,
                **mean,
                "ratio_to_plain": mean["step_ms"] / plain["step_ms"],
                "other": mean["step_ms"] - named,
                "tokens_per_step": sum(run["tokens"] for run in runs) / steps,
            }
        )
    return rows


class _StepParts:
    """Runs requests on an engine; sums up the time of the parts after the first token."""

    def __init__(self, contestant: Any) -> None:
        self._contestant = contestant
        self._totals = local_engine.trees_of(contestant.llm).totals
        self._attention = 0.0
        runner = local_engine.runner_of(contestant.llm)
        for layer in runner.compilation_config.static_forward_context.values():
            layer.impl.forward = self._timed(layer.impl.forward)

    def _timed(self, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return forward(*args, **kwargs)
            finally:
                self._attention += time.perf_counter() - start

        return call

    def _seconds(self) -> dict[str, float]:
        totals = self._totals
        return {
            "attention": self._attention,
            "drafting": totals.drafting_seconds,
            "preparation": totals.preparation_seconds,
            "bookkeeping": totals.bookkeeping_seconds,
        }

    def run(self, question: Any) -> dict[str, float]:
        """Return the steps, tokens and seconds of a request after its first token."""
        # The prefill's share is measured by a request that ends with it.
        before = self._seconds()
        self._contestant.run(question._replace(max_tokens=1))
        prefilled = self._seconds()
        measured = self._contestant.run(question)
        after = self._seconds()
        seconds = {
            name: after[name] - prefilled[name] - (prefilled[name] - before[name]) for name in after
        }
        return {
            "steps": measured.steps,
            "tokens": len(measured.output) - 1,
            "step_ms": measured.seconds - measured.first_token_seconds,
            **measured.parts,
            **seconds,
        }


if __name__ == "__main__":
    main()
