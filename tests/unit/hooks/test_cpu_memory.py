"""A CPU engine reserves no more memory than is free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from vllm_trie.vllm_hooks.setup.cpu_memory import reserve_what_is_free

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
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    asked: float,
    kv_cache_memory_bytes: int | None,
    is_cpu: bool,
    reserved: float,
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: is_cpu, raising=False)
    memory = SimpleNamespace(available_memory=free << 30, total_memory=100 << 30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda node: memory)
    cache = SimpleNamespace(
        gpu_memory_utilization=asked, kv_cache_memory_bytes=kv_cache_memory_bytes
    )
    config: Any = SimpleNamespace(cache_config=cache)
    reserve_what_is_free(config, asked)
    assert cache.gpu_memory_utilization == reserved
