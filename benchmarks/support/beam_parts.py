"""The part of `beam.py --parts`: the processor time of a native search, by function."""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from support.harness import Row

_RUNNER = "vllm.v1.worker.gpu_model_runner"
_ATTENTION = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl"
_SCHEDULER = "vllm_trie.searches.engine.scheduler.beam_scheduler.TrieBeamScheduler"
_FUNCTIONS = {
    "forward_ms": f"{_RUNNER}.GPUModelRunner._model_forward",
    "products_ms": "vllm._custom_ops.onednn_mm",
    "attention_ms": f"{_ATTENTION}.forward",
    "kv_writes_ms": f"{_ATTENTION}.do_kv_cache_update",
    "selection_ms": f"{_RUNNER}.GPUModelRunner._sample",
    "copies_ms": f"{_RUNNER}.copy_kv_cache_blocks_inplace",
    "schedule_ms": f"{_SCHEDULER}.schedule",
    "update_ms": f"{_SCHEDULER}.update_from_output",
}
_MODEL_PARTS = ("forward_ms", "logits_ms", "copies_ms")
PARTS_COLUMNS = (
    "prompt_len", "beam_width", "max_tokens", "total_ms", "logits_ms", *_FUNCTIONS,
    "host_ms_per_step",
)  # fmt: skip


@contextmanager
def timed_functions(model_class: type) -> Iterator[Counter[str]]:
    """Time the functions that the parts are named after; the counter has their seconds."""
    seconds: Counter[str] = Counter()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name] += time.process_time() - start

        return call

    with ExitStack() as stack:
        for name, target in _FUNCTIONS.items():
            patched = patch(target)
            original, _ = patched.get_original()
            stack.enter_context(patch(target, timed(name, original)))
        logits = timed("logits_ms", model_class.compute_logits)
        stack.enter_context(patch.object(model_class, "compute_logits", logits))
        yield seconds


def part_seconds(search: Callable[[], object], model_class: type) -> Counter[str]:
    """Return the processor time of a search, of its parts, and of what is not the model's: `host`.

    Args:
        search: Runs it.
        model_class: Class of the model, whose ``compute_logits`` is ``logits_ms``.
    """
    with timed_functions(model_class) as seconds:
        start = time.process_time()
        search()
        seconds["total_ms"] = time.process_time() - start
    seconds["host"] = seconds["total_ms"] - sum(seconds[name] for name in _MODEL_PARTS)
    return seconds


def measure_parts(bench: Any, options: Namespace, load: Any) -> list[Row]:
    """Return the row of one load of `--parts`: medians of the repeats, in processor time."""
    search = functools.partial(bench.run, "trie", load)
    search()  # warms up
    runs = [part_seconds(search, bench.model_class()) for _ in range(options.repeats)]
    for seconds in runs:
        seconds["host_ms_per_step"] = seconds["host"] / load.new_tokens
    return [
        {
            "method": "trie",
            "prompt_len": load.prompt_len,
            "beam_width": load.beam_width,
            "max_tokens": load.new_tokens,
            **{name: 1e3 * median(run[name] for run in runs) for name in PARTS_COLUMNS[3:]},
        }
    ]
