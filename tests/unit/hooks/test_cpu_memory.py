"""A CPU engine reserves no more memory than is free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig
from vllm.utils import cpu_resource_utils

from vllm_trie.vllm_hooks.setup.cpu_memory import reserve_what_is_free

DEFAULT = CacheConfig.gpu_memory_utilization


@pytest.mark.parametrize(
    ("free", "asked", "kv_cache_memory_bytes", "reserved"),
    [
        (80, DEFAULT, None, 0.4),
        (94, DEFAULT, None, 0.47),  # enough here, not once the processes have started
        (80, 0.9, None, 0.9),  # the user's choice, which vLLM refuses
        (80, DEFAULT, 1 << 30, DEFAULT),
    ],
)
def test_half_of_what_is_free_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    asked: float,
    kv_cache_memory_bytes: int | None,
    reserved: float,
) -> None:
    memory = SimpleNamespace(available_memory=free << 30, total_memory=100 << 30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda node: memory)
    cache = SimpleNamespace(
        gpu_memory_utilization=asked, kv_cache_memory_bytes=kv_cache_memory_bytes
    )
    config: Any = SimpleNamespace(cache_config=cache)
    reserve_what_is_free(config, asked)
    assert cache.gpu_memory_utilization == reserved
