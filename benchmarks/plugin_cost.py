"""The plugin's own time in a step, by part, without an engine.

Runs the plugin's code of a decoding step of Model Runner V1, from the scheduled drafts to the next
ones, with arrays in place of a model. Times are CPU time of the thread, so other processes change
them less than wall-clock time; each is the lower decile over steps. Two parts are not the plugin's
own time: the drafter, which is a row of its own, and the argmax of the logits, which a step of vLLM
without drafts takes as well. `own_ms` is the rest.

    OMP_NUM_THREADS=1 python benchmarks/plugin_cost.py --json cost.json
"""

from __future__ import annotations

from collections import defaultdict
from statistics import quantiles
from typing import Any

from support.harness import Row, finish, option_parser, run_quietly

COLUMNS = ("drafts", "requests", "part", "ms", "limit_ms")
LIMITS = {8: 0.4, 32: 1.2}
"""Milliseconds of a step with full trees, by number of requests."""
WARM_UP = 20


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, default=32, help="of each tree")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--drafts",
        nargs="+",
        choices=("full", "text", "none"),
        default=["full", "text", "none"],
        help="trees made before, trees of ngram_trie, no drafts",
    )
    options = parser.parse_args()
    finish(run_quietly(run, options), options.json, COLUMNS)


def run(options: Any) -> list[Row]:
    """Measure all batches; the best of the repeats, which other processes disturbed least."""
    from support.plugin_step import NOT_OWN

    rows: list[Row] = []
    for drafts in options.drafts:
        for num_requests in options.requests:
            size = (num_requests, options.nodes, drafts)
            totals = [whole_step(*size, options.steps) for _ in range(options.repeats)]
            parts = step_parts(*size, options.steps)
            rest = sum(ms for part, ms in parts.items() if part in NOT_OWN)
            head = {"drafts": drafts, "requests": num_requests, "nodes": options.nodes}
            limit = LIMITS.get(num_requests) if drafts == "full" else None
            rows.append({**head, "part": "own_ms", "ms": min(totals) - rest, "limit_ms": limit})
            rows += [{**head, "part": part, "ms": ms} for part, ms in parts.items()]
    return rows


def whole_step(num_requests: int, num_nodes: int, drafts: str, num_steps: int) -> float:
    """Return the milliseconds of a step, the drafter and the argmax included."""
    from support.plugin_step import PluginStep

    step = PluginStep(num_requests, num_nodes, drafts)
    return _lower_decile([step.run() for _ in range(WARM_UP + num_steps)][WARM_UP:])


def step_parts(num_requests: int, num_nodes: int, drafts: str, num_steps: int) -> dict[str, float]:
    """Return the milliseconds of each part of a step."""
    from support.plugin_step import Parts, PluginStep

    parts = Parts()
    step = PluginStep(num_requests, num_nodes, drafts, parts)
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(WARM_UP + num_steps):
        parts.seconds.clear()
        step.run()
        if number >= WARM_UP:
            for part, seconds in parts.seconds.items():
                samples[part].append(seconds)
    return {part: _lower_decile(seconds) for part, seconds in samples.items()}


def _lower_decile(seconds: list[float]) -> float:
    """Return milliseconds."""
    return 1e3 * quantiles(seconds, n=10)[0]


if __name__ == "__main__":
    main()
