"""The part of `beam.py --wide`: its loads and rows; and random items."""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from statistics import median
from typing import Any

import numpy as np

from support.harness import Row, Timed, interleave, median_ratio, median_seconds

WIDE_COLUMNS = (
    "method", "prompt_len", "max_tokens", "beam_width", "num_prompts", "total_ms", "cpu_ms",
    "requests_per_s", "ratio_to_trie", "cpu_ratio_to_trie", "equal_to_trie",
)  # fmt: skip
WIDE_DEFAULTS = {
    "methods": ["trie", "vllm", "hf"], "widths": [10, 50, 100, 200, 400],
    "prompt_lens": [200, 1500], "num_prompts": [1, 4], "tokens": [3, 4, 8],
}  # fmt: skip
HF_MAX_TOKENS_WIDE = 100_000  # a few new tokens


def random_items(count: int, length: int, values: int, first: int = 0) -> np.ndarray:
    """Return int32 [count, length], distinct random items in random order.

    Each place has `values` tokens of its own, from `first` on.
    """
    codes = np.random.default_rng(0).choice(values**length, size=count, replace=False)
    digits = codes[:, None] // values ** np.arange(length)[::-1] % values
    return (first + digits + values * np.arange(length)).astype(np.int32)


def measure_wide(bench: Any, options: Namespace, load: Any) -> list[Row]:
    """Return the rows of one load of `--wide`, one for each method."""
    size = load.num_prompts * load.beam_width * load.prompt_len
    methods = [name for name in options.methods if name != "hf" or size <= HF_MAX_TOKENS_WIDE]

    def run(name: str) -> tuple[float, list[list[list[int]]]]:
        start = time.process_time()
        answers = bench.run(name, load)
        return time.process_time() - start, answers

    if "trie" in methods:
        bench.run("trie", load)  # warms up
    timed = interleave({name: functools.partial(run, name) for name in methods}, options.repeats)
    seconds = {name: median_seconds(timed[name]) for name in methods}
    cpu = {name: median(result[0] for _, result in timed[name]) for name in methods}
    answers = {name: timed[name][0][1][1] for name in methods}
    return [
        {
            "method": name,
            "prompt_len": load.prompt_len,
            "max_tokens": load.new_tokens,
            "beam_width": load.beam_width,
            "num_prompts": load.num_prompts,
            "total_ms": 1e3 * seconds[name],
            "cpu_ms": 1e3 * cpu[name],
            "requests_per_s": load.num_prompts / seconds[name],
            "repeats": options.repeats,
            "compiled": not options.eager,
            **(compared(name, timed, cpu, answers) if "trie" in methods else {}),
        }
        for name in methods
    ]


def compared(
    name: str, timed: dict[str, Timed], cpu: dict[str, float], answers: dict[str, Any]
) -> Row:
    """Return a method's time and results next to those of `trie`."""
    pairs = [
        (theirs, ours)
        for prompt, of_trie in zip(answers[name], answers["trie"], strict=True)
        for theirs, ours in zip(prompt, of_trie, strict=True)
    ]
    return {
        "ratio_to_trie": median_ratio(timed[name], timed["trie"]),
        "cpu_ratio_to_trie": cpu[name] / cpu["trie"],
        "equal_to_trie": sum(theirs == ours for theirs, ours in pairs) / len(pairs),
    }
