"""Speculation in the real engine: speed against plain vLLM, and the cost of the plugin's hooks.

Rows of the methods named by `--methods`, and of vLLM's own drafters, come from the demo's prompts,
decoded to their end. No drafter remembers finished requests, because every repeat asks for the same
text again. Rows of `full_trees` come from a drafter whose trees always have as many nodes as they
may. Their `hook_ms_per_step` is the cost for that many nodes, moves of KV included; their tokens/s
means nothing. All times are medians.

    python benchmarks/speculation.py --json speculation.json
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from support.device import add_device_options, check_device, engine_options, start_engine
from support.engines import Prompts, after_each_step, count_steps, decode, keep_kernel_overrides
from support.harness import (
    Row,
    Timed,
    add_model_option,
    finish,
    interleave,
    median_seconds,
    option_parser,
    run_quietly,
)

from vllm_trie.lab import local_engine

PEERS = ("ngram", "suffix")
"""vLLM's own drafters that need no second model."""
COLUMNS = (
    "method", "nodes", "batch_size", "tokens_per_s", "ratio_to_plain", "tokens_per_step",
    "nodes_per_step", "hook_ms_per_step", "draft_ms_per_step", "identical",
)  # fmt: skip


class HookTimes(NamedTuple):
    """Seconds of the plugin's own code, summed over an engine's steps or in one of them."""

    requests: int
    """Requests that got tokens."""
    preparation: float
    verification: float
    bookkeeping: float
    drafting: float

    @classmethod
    def of(cls, stats: Any) -> HookTimes:
        """Return the times in a `TreeStats`."""
        return cls(
            stats.steps,
            stats.preparation_seconds,
            stats.verification_seconds,
            stats.bookkeeping_seconds,
            stats.drafting_seconds,
        )

    @property
    def hooks(self) -> float:
        """All of it except the drafter."""
        return self.preparation + self.verification + self.bookkeeping


def watch_hooks(llm: Any) -> list[HookTimes]:
    """Return a list that grows by an entry with each step of an engine in this process."""
    seen: list[HookTimes] = []
    before = HookTimes(0, 0.0, 0.0, 0.0, 0.0)

    def note(trees: Any) -> None:
        nonlocal before
        now = HookTimes.of(trees.totals)
        if now.requests > before.requests:
            seen.append(HookTimes(*(b - a for a, b in zip(before, now, strict=True))))
        before = now

    after_each_step(llm, note)
    return seen


class Contestant:
    """One engine, its method, and the times of its hooks."""

    def __init__(
        self,
        method: str,
        nodes: int,
        model: str,
        extra: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.method, self.nodes = method, nodes
        config = None
        if method != "plain":
            config = {
                "method": method,
                "num_speculative_tokens": nodes,
                **local_engine.without_memory(method),
                **(extra or {}),
            }
        self.llm = start_engine(model, **settings, speculative_config=config)
        has_trees = method not in ("plain", *PEERS)
        self._hooks = watch_hooks(self.llm) if has_trees else []

    def measure(self, prompts: Prompts, params: Any, batch_size: int) -> Any:
        """Return a function that decodes all prompts and returns their outputs."""
        return lambda: decode(self.llm, prompts, params, batch_size)

    def count(self, prompts: Prompts, params: Any, batch_size: int) -> Row:
        """Return tokens and nodes of a step and request; the run also warms the engine up."""
        counted = count_steps(self.llm, prompts, params, batch_size)
        self._hooks.clear()
        return counted

    def hook_times(self, full_batch: int | None = None) -> Row:
        """Return medians over the steps since the last call; of full batches only, if asked."""
        seen = [step for step in self._hooks if full_batch in (None, step.requests)]
        self._hooks.clear()

        def milliseconds(name: str) -> float:
            return 1e3 * median(getattr(step, name) for step in seen) if seen else 0.0

        return {
            "hook_ms_per_step": milliseconds("hooks"),
            "preparation_ms_per_step": milliseconds("preparation"),
            "verification_ms_per_step": milliseconds("verification"),
            "bookkeeping_ms_per_step": milliseconds("bookkeeping"),
            "draft_ms_per_step": milliseconds("drafting"),
        }

    def row(self, batch_size: int, timed: Timed, expected: list[list[int]]) -> Row:
        """Return the columns that all rows have; `expected` is plain vLLM's output."""
        return {
            "method": self.method,
            "nodes": self.nodes,
            "batch_size": batch_size,
            "tokens_per_s": sum(map(len, timed[0][1])) / median_seconds(timed),
            "identical": all(outputs == expected for _, outputs in timed),
        }


def compare(
    contestants: Sequence[Contestant], prompts: Prompts, params: Any, batch_size: int, repeats: int
) -> list[Row]:
    """Return the rows of all contestants at one batch size; the first is the baseline."""
    counted = [contestant.count(prompts, params, batch_size) for contestant in contestants]
    runs = {
        i: contestant.measure(prompts, params, batch_size)
        for i, contestant in enumerate(contestants)
    }
    timed = interleave(runs, repeats)
    plain_seconds, expected = median_seconds(timed[0]), timed[0][0][1]
    return [
        contestant.row(batch_size, timed[index], expected)
        | {"ratio_to_plain": plain_seconds / median_seconds(timed[index])}
        | counted[index]
        | contestant.hook_times()
        for index, contestant in enumerate(contestants)
    ]


def full_tree_rows(
    plain: Contestant,
    contestants: Sequence[Contestant],
    prompts: Prompts,
    params: Any,
    batch_size: int,
    repeats: int,
) -> list[Row]:
    """Return the rows of the drafter with full trees, from steps with the whole batch."""
    from support.full_trees import FullTreesDrafter

    answers = decode(plain.llm, prompts, params, batch_size)
    FullTreesDrafter.answers.update(
        {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    )
    rows = []
    for contestant in contestants:
        counted = contestant.count(prompts, params, batch_size)
        timed = interleave({0: contestant.measure(prompts, params, batch_size)}, repeats)[0]
        rows.append(
            contestant.row(batch_size, timed, answers)
            | {"ratio_to_plain": None}
            | counted
            | contestant.hook_times(batch_size)
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    add_model_option(parser, "a chat model; the shipped one if left out")
    parser.add_argument("--methods", nargs="*", default=["ngram_trie"], help="the plugin's methods")
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM's own drafters out")
    parser.add_argument(
        "--full-trees", action="store_true", help="measure the cost of the hooks alone"
    )
    add_device_options(parser)
    options = parser.parse_args()
    finish(run_quietly(run, options), options.json, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start all engines, then measure."""
    from support.full_trees import FullTreesDrafter
    from support.prompts import demo_chats
    from vllm import SamplingParams

    from vllm_trie.drafters import register
    from vllm_trie.lab.tiny_model import model_path

    check_device(options.device)
    register(FullTreesDrafter)
    model = options.model or str(model_path())
    prompts = list(demo_chats(model).values())
    settings = {
        **engine_options(options),
        "max_model_len": local_engine.room_for(
            max(map(len, prompts)), options.max_tokens, max(options.nodes)
        ),
        "max_num_seqs": max(options.batch_sizes),
    }
    plain = Contestant("plain", 0, model, **settings)
    keep_kernel_overrides()
    methods = [] if options.full_trees else list(options.methods)
    if not (options.full_trees or options.no_peers):
        methods += [
            peer
            for peer in PEERS
            if peer != "suffix" or importlib.util.find_spec("arctic_inference") is not None
        ]
    contestants = [
        Contestant(method, nodes, model, **settings)
        for method in methods
        for nodes in options.nodes
    ]
    full = [
        Contestant(FullTreesDrafter.name, nodes, model, {"node_budget": "fixed"}, **settings)
        for nodes in options.nodes
    ]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    endless = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    rows = []
    for batch_size in options.batch_sizes:
        rows += compare([plain, *contestants], prompts, params, batch_size, options.repeats)
        rows += full_tree_rows(plain, full, prompts, endless, batch_size, options.repeats)
    return rows


if __name__ == "__main__":
    main()
