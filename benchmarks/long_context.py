"""What drafts cost behind a long prompt: the first token, and a step with some numbers of nodes.

Prompts are the demo's, one behind the other, up to some length. A method's name ends with its nodes
where their number is fixed; `ngram_trie` chooses it at each step. Times are medians of the repeats,
of the same tokens in turns, and over plain vLLM's.

    python benchmarks/long_context.py --model smollm2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, cycle, islice
from statistics import median

from support.harness import Row, add_model_option, option_parser, report_quietly
from support.peers_engines import METHODS, PLAIN, Contestant, Measured, Question, run_in_turns

from vllm_trie.lab import local_engine

COLUMNS = (
    "prompt", "method", "first_token_ms", "first_token_over_plain", "nodes_per_step", "ms_per_step",
    "step_over_plain", "tokens_per_step",
)  # fmt: skip


def main() -> None:
    """Measure and print."""
    smoke = {"prompt_lens": [40], "nodes": [8], "max_tokens": 8, "eager": True}
    parser = option_parser(__doc__, repeats=5, smoke=smoke)
    add_model_option(parser, "a chat model; the shipped one if left out")
    parser.add_argument("--prompt-lens", type=int, nargs="+", default=[100, 500, 1500, 2000, 6000])
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 24, 32])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["ngram", "ngram_trie"])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="run the model without compilation")
    options = parser.parse_args()
    local_engine.set_environment(options.verbose, local_engine.with_all_cores())
    report_quietly(run, options, COLUMNS)


def run(options: argparse.Namespace) -> list[Row]:
    """Start all engines, then measure each length in turns."""
    from support.prompts import demo_chats

    from vllm_trie.lab.tiny_model import model_path

    model = options.model or str(model_path())
    methods = [PLAIN, *options.methods]
    for nodes in options.nodes:
        methods.append(f"ngram_trie {nodes}")
        fixed = {"num_speculative_tokens": nodes, "node_budget": "fixed"}
        METHODS[methods[-1]] = {**(METHODS["ngram_trie"] or {}), **fixed}
    settings = {
        "dtype": options.dtype,
        "enforce_eager": options.eager,
        "enable_prefix_caching": False,
        "max_model_len": local_engine.room_for(
            max(options.prompt_lens), options.max_tokens, max([32, *options.nodes])
        ),
    }
    with local_engine.silence(not options.verbose):
        contestants = [Contestant(method, model, **settings) for method in methods]
    text = list(chain.from_iterable(demo_chats(model).values()))
    rows = []
    for length in options.prompt_lens:
        question = Question("", list(islice(cycle(text), length)), [], options.max_tokens)
        measured: dict[str, list[Measured]] = defaultdict(list)
        runs = run_in_turns(contestants, [question], options.repeats + 1, lambda _: None)
        for _, method, result in islice(runs, len(contestants), None):  # the first turn warms up
            measured[method].append(result)
        rows += [row_of(length, method, measured) for method in methods]
    return rows


def row_of(length: int, method: str, measured: dict[str, list[Measured]]) -> Row:
    """Return a method's medians."""
    results, plain = measured[method], measured[PLAIN]

    def first_token(result: Measured) -> float:
        return 1e3 * result.first_token_seconds

    def step(result: Measured) -> float:
        return 1e3 * (result.seconds - result.first_token_seconds) / result.steps

    def over_plain(ms: Callable[[Measured], float]) -> float:
        return median(ms(ours) / ms(theirs) for ours, theirs in zip(results, plain, strict=True))

    steps = sum(result.steps for result in results)
    return {
        "prompt": length,
        "method": method,
        "first_token_ms": median(map(first_token, results)),
        "first_token_over_plain": over_plain(first_token),
        "nodes_per_step": sum(result.nodes for result in results) / steps,
        "ms_per_step": median(map(step, results)),
        "step_over_plain": over_plain(step),
        "tokens_per_step": sum(len(result.output) - 1 for result in results) / steps,
    }


if __name__ == "__main__":
    main()
