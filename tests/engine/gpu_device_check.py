"""The check of tree attention at start-up, with small steps, and broken parts that it must find.

Imported after :mod:`tests.engine.v2_on_cpu`, as it needs Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vllm_trie.attention import gpu_launch, triton_kernel
from vllm_trie.drafts.engine.attention import cuda as cuda_attention
from vllm_trie.extras.device_checks import gpu_check
from vllm_trie.extras.device_checks.kernel_check import RequestShape

CHECKED = [
    [
        RequestShape(20, 1, 9),
        RequestShape(33, 1, 0),
        RequestShape(2, 3, 66),  # more than a word
        RequestShape(2, 15, 0),  # a prefill chunk
    ],
    [RequestShape(0, 5, 4)],
]


def broken_parts(patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Break one part after another; the parts before are whole again."""
    impl = cuda_attention.TreeTritonAttentionImpl

    def all_seen(self: Any, trees: Any) -> None:
        stock_write(self, trees)
        self.trees[self._header.size :] = -1

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
    messages = {}
    for number, part in enumerate(broken_parts(pytest.MonkeyPatch())):
        try:
            gpu_check.check_device(runner, CHECKED[:1], splits=(1,))
            messages[f"{number} {part}"] = ""
        except RuntimeError as error:
            messages[f"{number} {part}"] = str(error)
    return messages
