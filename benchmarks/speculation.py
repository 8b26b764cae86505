"""Speculation in the real engine: speed beside plain vLLM and its own drafters, and what the
plugin's hooks cost in a step.

Rows of the methods named by `--methods` come from the demo's prompts, decoded to their end; no
drafter remembers finished requests, because every repeat asks for the same text again. Rows of
`full_trees` come from a drafter whose trees always have exactly as many nodes as they may, so that
`hook_ms_per_step` is the cost for that many nodes, moves of KV included; their tokens/s says
nothing. All times are medians.

    python benchmarks/speculation.py --json speculation.json
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from _common import Row, finish, in_turns, median_seconds, option_parser, quietly

from vllm_trie.demo import engines, measure
from vllm_trie.demo.prompts import chat_tokens, demo_prompts

PEERS = ("ngram", "suffix")
"""vLLM's own drafters that need no second model."""
COLUMNS = (
    "method",
    "nodes",
    "batch_size",
    "tokens_per_s",
    "ratio_to_plain",
    "tokens_per_step",
    "nodes_per_step",
    "hook_ms_per_step",
    "draft_ms_per_step",
    "identical",
)


class HookTimes(NamedTuple):
    """Seconds of one engine step in the plugin's own code."""

    requests: int
    """Requests that got tokens."""
    preparation: float
    verification: float
    bookkeeping: float
    drafting: float

    @property
    def hooks(self) -> float:
        """All of it except the drafter."""
        return self.preparation + self.verification + self.bookkeeping


def watch_hooks(llm: Any) -> list[HookTimes]:
    """A list that grows by an entry with each later step of an engine in this process."""
    from vllm_trie.vllm_hooks.worker.stats import STATS_ATTRIBUTE

    runner, seen = engines.runner_of(llm), []
    stock = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        output = stock(grammar_output)
        stats = getattr(output, STATS_ATTRIBUTE, None)
        if stats is not None:
            seen.append(
                HookTimes(
                    stats.steps,
                    stats.preparation_seconds,
                    stats.verification_seconds,
                    stats.bookkeeping_seconds,
                    stats.drafting_seconds,
                )
            )
        return output

    runner.sample_tokens = sample_tokens
    return seen


def keep_kernel_overrides() -> None:
    """Let later engines of this process use the kernel overrides of the first.

    vLLM 0.32 registers its overrides for the CPU again with every engine, and its search through
    all loaded modules stumbles over one of numba's, which the method `ngram` imports.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


class Contestant:
    """One engine, its name and what was seen of its hooks."""

    def __init__(
        self,
        method: str,
        nodes: int,
        model: str,
        extra: dict[str, Any] | None = None,
        **limits: int,
    ) -> None:
        self.method, self.nodes = method, nodes
        self.is_ours = method not in ("plain", *PEERS)
        config = None
        if method != "plain":
            config = {
                "method": method,
                "num_speculative_tokens": nodes,
                **engines.without_memory(method),
                **(extra or {}),
            }
        self.llm = engines.start_engine(model, **limits, speculative_config=config)
        self.hooks = watch_hooks(self.llm) if self.is_ours else []

    def run(self, prompts: Sequence[Sequence[int]], params: Any, batch_size: int) -> Any:
        """Decode all prompts, `batch_size` at a time; their outputs."""
        outputs = []
        for group in measure.batches(prompts, batch_size):
            some, _ = measure.generate(self.llm, [prompts[index] for index in group], params)
            outputs += some
        return outputs

    def count(self, prompts: Sequence[Sequence[int]], params: Any, batch_size: int) -> Row:
        """Tokens and nodes of a step and request; also warms the engine up."""
        counts = []
        for group in measure.batches(prompts, batch_size):
            some, _ = measure.observe(self.llm, [prompts[index] for index in group], params)
            counts += some
        steps = sum(count.steps for count in counts)
        return {
            "tokens_per_step": sum(count.tokens for count in counts) / steps,
            "nodes_per_step": sum(count.nodes for count in counts) / steps,
        }

    def hook_times(self, full_batch: int | None) -> Row:
        """Medians over the steps seen since the last call; of full batches only, if asked."""
        seen = [step for step in self.hooks if full_batch is None or step.requests == full_batch]
        self.hooks.clear()

        def milliseconds(name: str) -> float:
            return 1e3 * median(getattr(step, name) for step in seen) if seen else 0.0

        return {
            "hook_ms_per_step": milliseconds("hooks"),
            "preparation_ms_per_step": milliseconds("preparation"),
            "verification_ms_per_step": milliseconds("verification"),
            "bookkeeping_ms_per_step": milliseconds("bookkeeping"),
            "draft_ms_per_step": milliseconds("drafting"),
        }


def compare(
    contestants: Sequence[Contestant],
    prompts: Sequence[Sequence[int]],
    params: Any,
    batch_size: int,
    repeats: int,
) -> list[Row]:
    """Rows of all contestants at one batch size, the first of them the baseline."""
    counted = [each.count(prompts, params, batch_size) for each in contestants]
    for each in contestants:
        each.hooks.clear()

    def runner(each: Contestant) -> Any:
        return lambda: each.run(prompts, params, batch_size)

    timed = in_turns({i: runner(each) for i, each in enumerate(contestants)}, repeats)
    plain_seconds, expected = median_seconds(timed[0]), timed[0][0][1]
    return [
        _row(each, batch_size, timed[index], expected)
        | {"ratio_to_plain": plain_seconds / median_seconds(timed[index])}
        | counted[index]
        | each.hook_times(None)
        for index, each in enumerate(contestants)
    ]


def _row(
    each: Contestant,
    batch_size: int,
    timed: Sequence[tuple[float, list[list[int]]]],
    expected: list[list[int]],
) -> Row:
    """What all rows say.

    Args:
        each: the contestant.
        batch_size: prompts that ran together.
        timed: seconds and outputs of its repeats.
        expected: plain vLLM's outputs.
    """
    num_tokens = sum(map(len, timed[0][1]))
    return {
        "method": each.method,
        "nodes": each.nodes,
        "batch_size": batch_size,
        "tokens_per_s": num_tokens / median_seconds(timed),
        "identical": all(outputs == expected for _, outputs in timed),
    }


def full_tree_rows(
    plain: Contestant,
    contestants: Sequence[Contestant],
    prompts: Sequence[Sequence[int]],
    params: Any,
    batch_size: int,
    repeats: int,
) -> list[Row]:
    """Rows of the drafter with full trees; its hooks are timed in steps with the whole batch."""
    from _full_trees import FullTreesDrafter

    answers = plain.run(prompts, params, batch_size)
    FullTreesDrafter.answers.update(
        {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
    )
    rows = []
    for each in contestants:
        counted = each.count(prompts, params, batch_size)
        each.hooks.clear()
        timed = in_turns({0: lambda e=each: e.run(prompts, params, batch_size)}, repeats)[0]
        rows.append(
            _row(each, batch_size, timed, answers)
            | {"ratio_to_plain": None}
            | counted
            | each.hook_times(batch_size)
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    parser.add_argument("--model", help="a chat model; the shipped one if left out")
    parser.add_argument("--methods", nargs="*", default=["ngram_trie"], help="the plugin's methods")
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 32, 64])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM's own drafters out")
    parser.add_argument(
        "--full-trees", action="store_true", help="measure the cost of the hooks alone"
    )
    options = parser.parse_args()
    finish(quietly(run, options), options.json, COLUMNS)


def run(options: Any) -> list[Row]:
    """Start all engines, then measure."""
    import _full_trees
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    from vllm_trie.tiny_model import model_path

    _full_trees.register()
    model = options.model or str(model_path())
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [chat_tokens(tokenizer, prompt.message) for prompt in demo_prompts()]
    limits = {
        "max_model_len": engines.room_for(
            max(map(len, prompts)), options.max_tokens, max(options.nodes)
        ),
        "max_num_seqs": max(options.batch_sizes),
    }
    plain = Contestant("plain", 0, model, **limits)
    keep_kernel_overrides()
    methods = [] if options.full_trees else list(options.methods)
    if not (options.full_trees or options.no_peers):
        methods += [
            peer
            for peer in PEERS
            if peer != "suffix" or importlib.util.find_spec("arctic_inference") is not None
        ]
    contestants = [
        Contestant(method, nodes, model, **limits) for method in methods for nodes in options.nodes
    ]
    full = [
        Contestant(_full_trees.METHOD, nodes, model, {"node_budget": "fixed"}, **limits)
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
