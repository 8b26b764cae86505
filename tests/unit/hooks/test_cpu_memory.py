"""A CPU engine reserves no more memory than is free, and has blocks that beams can share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from vllm_trie.drafts.engine.workers import cpu_worker
from vllm_trie.hooks.start import cpu_memory
from vllm_trie.hooks.start.cpu_memory import reserve_what_is_free, shrink_blocks

DEFAULT = CacheConfig.gpu_memory_utilization


@pytest.mark.parametrize(
    ("free", "asked", "kv_cache_memory_bytes", "is_cpu", "reserved"),
    [
        (80, DEFAULT, None, True, 0.4),
        (94, DEFAULT, None, True, 0.47),  # enough here, not once the processes have started
        (80, 0.9, None, True, 0.9),  # the user's choice, which vLLM refuses
        (80, DEFAULT, 1 << 30, True, DEFAULT),
        (80, DEFAULT, None, False, DEFAULT),  # a GPU's memory is another
    ],
)
def test_half_of_what_is_free_is_reserved(
    monkeypatch, free, asked, kv_cache_memory_bytes, is_cpu, reserved
):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu, raising=False)
    memory = SimpleNamespace(available_memory=free << 30, total_memory=100 << 30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda node: memory)
    cache = SimpleNamespace(
        gpu_memory_utilization=asked, kv_cache_memory_bytes=kv_cache_memory_bytes
    )
    config: Any = SimpleNamespace(cache_config=cache)
    reserve_what_is_free(config, asked)
    assert cache.gpu_memory_utilization == reserved


@pytest.mark.parametrize(
    ("size", "asked", "reason", "is_cpu", "more", "expected"),
    [
        (128, None, None, True, {}, 32),
        (128, 128, None, True, {}, 128),
        (16, None, None, True, {}, 16),  # the model's attention takes no other
        (128, None, "off", True, {}, 128),
        (128, None, None, False, {}, 128),
        (128, None, None, True, {"num_gpu_blocks_override": 64}, 128),
        (128, None, None, True, {"prefix_match_unit": 128}, 128),
    ],
)
def test_blocks_are_small_where_searches_are_served(
    monkeypatch, size, asked, reason, is_cpu, more, expected
):
    monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu, raising=False)
    monkeypatch.setattr(cpu_memory, "reason_off", lambda config: reason)
    cache = CacheConfig(block_size=size, **more)
    model = SimpleNamespace(is_hybrid=False)
    config: Any = SimpleNamespace(cache_config=cache, model_config=model)
    shrink_blocks(config, asked)
    assert cache.block_size == expected
    assert cache.user_specified_block_size or expected != 32


@pytest.mark.parametrize(
    ("dtype", "instructions", "is_warned"),
    [
        (torch.bfloat16, (), True),
        (torch.bfloat16, ("avx512_bf16",), False),
        (torch.float16, ("avx512_bf16",), True),
        (torch.float16, ("avx512_bf16", "avx512_fp16"), False),
        (torch.float32, (), False),
    ],
)
def test_a_dtype_without_instructions_is_warned_of(monkeypatch, dtype, instructions, is_warned):
    capabilities = dict.fromkeys(torch.cpu.get_capabilities(), False)
    capabilities |= {"architecture": "x86_64", **dict.fromkeys(instructions, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    warnings = []
    monkeypatch.setattr(cpu_worker.logger, "warning", lambda *message: warnings.append(message))
    cpu_worker.warn_of_slow_dtype(dtype)
    assert len(warnings) == is_warned
