"""Runs an engine whose layers use the GPU's attention classes, on a CPU, in Triton's interpreter.

A program of its own, as TRITON_INTERPRET=1 must be set before Triton is imported. vLLM disables
Triton on CPUs; here its Triton backend, the stock one that the tree backend derives from, is
imported with the real Triton. Prints one JSON object: the tokens of two engines, what was done on
the way, and what the check at start-up says to broken parts.
"""

# What is set up here must stand before the imports that it is for.
# ruff: noqa: E402

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest
import torch
import triton
import triton.language
import vllm.triton_utils

NODES = 12
TOKENS = 14
PROMPTS = [
    [5, 6, 7, 8, 9, 10, 11, 5, 6, 7],
    list(range(40, 120)),  # a chunk of it is left for the step after the first
    [3, 4] * 12,
    [9],
]


@contextlib.contextmanager
def real_triton() -> Iterator[None]:
    """vLLM's modules that are imported inside get Triton instead of its placeholder."""
    names = {"triton": triton, "tl": triton.language}
    placeholders = {name: getattr(vllm.triton_utils, name) for name in names}
    for name, module in names.items():
        setattr(vllm.triton_utils, name, module)
    try:
        yield
    finally:
        for name, module in placeholders.items():
            setattr(vllm.triton_utils, name, module)


with real_triton():
    import vllm.v1.attention.backends.triton_attn

# vLLM's cache update asks the device what it can do.
torch.cuda.get_device_capability = lambda *device: (9, 0)

from vllm import LLM, SamplingParams
from vllm.plugins import load_general_plugins

from tests.engine.compare import register_test_drafters, speculation
from tests.engine.conftest import runner_of, trees_of
from tests.engine.drafters import OracleDrafter
from vllm_trie.attention import gpu_launch, triton_kernel
from vllm_trie.attention.kernel_check import RequestShape
from vllm_trie.tiny_model import model_path
from vllm_trie.vllm_hooks.worker import cpu_worker as worker
from vllm_trie.vllm_hooks.worker import gpu_check
from vllm_trie.vllm_hooks.worker.attention import cuda as cuda_attention
from vllm_trie.vllm_hooks.worker.attention.cuda import TreeTritonAttentionImpl
from vllm_trie.vllm_hooks.worker.runners import v1_adapter
from vllm_trie.vllm_hooks.worker.verification import compaction

CHECKED = [
    [
        RequestShape(20, 1, 9),
        RequestShape(33, 1, 0),
        RequestShape(2, 3, 66),  # more than a word
        RequestShape(2, 15, 0),  # a prefill chunk
    ],
    [RequestShape(0, 5, 4)],
]
GPU_BACKEND = "vllm_trie.vllm_hooks.worker.attention.cuda.TreeTritonAttentionBackend"


def engine(**options: Any) -> LLM:
    settings: dict[str, Any] = {
        "model": str(model_path()),
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 12 << 20,
        "block_size": 32,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "seed": 0,
        **options,
    }
    return LLM(**settings)


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def broken_parts(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Break one part after another; the parts before are whole again."""
    impl = cuda_attention.TreeTritonAttentionImpl

    def all_seen(self: Any, trees: Any) -> None:
        stock_write(self, trees)
        self.trees[len(self._header) * 2 :] = -1

    def all_in_kernel(*arguments: Any) -> None:
        stock_kernel(*arguments[:9], triton_kernel.EVERY_LENGTH, *arguments[10:])

    def other_blocks(query: Any, cache: Any, table: Any, *arguments: Any) -> None:
        stock_kernel(query, cache, table.flip(0), *arguments)

    def keys_only(kv_caches: Any, source: Any, target: Any) -> None:
        values = [cache[..., cache.shape[3] // 2 :] for cache in kv_caches]
        before = [value.clone() for value in values]
        stock_move(kv_caches, source, target)
        for value, kept in zip(values, before, strict=True):
            value.copy_(kept)

    def values_first(self: Any, layer: Any, key: Any, value: Any, *arguments: Any) -> None:
        stock_update(self, layer, value, key, *arguments)

    def fault(self: Any, *arguments: Any) -> None:
        raise RuntimeError("a fault of the device")

    stock_write = gpu_launch.TreeBuffers.write
    stock_kernel = triton_kernel.tree_attention_triton
    stock_move = impl.move_slots
    stock_update = impl.do_kv_cache_update
    for owner, name, replacement in (
        (gpu_launch.TreeBuffers, "write", all_seen),
        (cuda_attention, "tree_attention_triton", other_blocks),
        (cuda_attention, "tree_attention_triton", all_in_kernel),
        (impl, "move_slots", staticmethod(keys_only)),
        (impl, "do_kv_cache_update", values_first),
        (impl, "forward", fault),
    ):
        with patch.context() as context:
            context.setattr(owner, name, replacement)
            yield replacement.__name__


def refusals(runner: Any) -> dict[str, str]:
    """What the check says to each broken part; empty where it lets one pass."""
    found = {}
    for number, part in enumerate(broken_parts(pytest.MonkeyPatch())):
        try:
            gpu_check.check_device(runner, CHECKED[:1], splits=(1,))
            found[f"{number} {part}"] = ""
        except RuntimeError as error:
            found[f"{number} {part}"] = str(error)
    return found


def count_work(counts: dict[str, int]) -> None:
    """Count layers that see trees, a prefill chunk next to them, and neither, and moved tokens."""
    stock_forward = TreeTritonAttentionImpl.forward
    stock_moved = compaction.moved_tokens

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        metadata = arguments[5]
        if metadata is not None:
            is_long = metadata.max_query_len > metadata.longest_decode
            kind = "trees" if metadata.has_trees else "plain"
            counts["chunks" if is_long and metadata.has_trees else kind] += 1
        return stock_forward(self, *arguments, **options)

    def moved_tokens(rows: Any, accepted: Any) -> Any:
        moved = stock_moved(rows, accepted)
        counts["moved"] += len(moved[0])
        return moved

    TreeTritonAttentionImpl.forward = forward
    compaction.moved_tokens = moved_tokens


def main() -> int:
    register_test_drafters(pytest.MonkeyPatch())
    load_general_plugins()
    result: dict[str, Any] = {"plain": tokens(engine())}
    OracleDrafter.answers = {
        tuple(prompt): output for prompt, output in zip(PROMPTS, result["plain"], strict=True)
    }
    worker.CPU_BACKEND_CLASS = GPU_BACKEND
    v1_adapter.prefers_chains = lambda *kernels: False  # as on a GPU
    llm = engine(**speculation("test_oracle", NODES))
    runner = runner_of(llm)
    layers = runner.compilation_config.static_forward_context.values()
    assert all(type(layer.impl) is TreeTritonAttentionImpl for layer in layers)
    check = gpu_check.check_device(runner, CHECKED, splits=(1, 2))
    result["check"] = check.largest_error
    result["checked_steps"] = check.num_steps
    result["refusals"] = refusals(runner)
    assert not any(layer.kv_cache.any() for layer in layers)
    totals = trees_of(llm).totals
    counts = {"trees": 0, "chunks": 0, "plain": 0, "moved": 0}
    count_work(counts)
    result["with_trees"] = tokens(llm)
    result["counts"] = counts
    result["tokens_per_step"] = totals.tokens / totals.steps
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
