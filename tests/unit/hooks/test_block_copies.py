"""The CPU worker's copies of tail blocks, against vLLM's own."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from vllm_trie.attention.native import NativeKernels
from vllm_trie.searches.engine.scheduler.tables import RangedCopies
from vllm_trie.searches.engine.worker import block_copies

COPIES = [KVCacheBlockCopy(1, 4), KVCacheBlockCopy(2, 5)]


def caches(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(6, 2, 32, 32, generator=generator).to(dtype) for _ in range(2)]
    return [*made, made[1]]  # the last layer shares the cache of the one before


def refuse(*arguments: Any) -> None:
    raise AssertionError("vLLM's own copy was called")


@pytest.mark.parametrize("isa", ["vec", ""])
def test_ranges_where_the_place_of_slots_is_known(isa, monkeypatch):
    """Elsewhere whole blocks."""
    monkeypatch.setattr(block_copies, "_isa_of_slots", lambda *arguments: isa)
    copied, before = caches(torch.float32), caches(torch.float32)
    ranged = RangedCopies(COPIES, [(3, 5), None])
    block_copies.copy_kv_cache_blocks_inplace(refuse, copied, 6, ranged)
    for cache, old in zip(copied, before, strict=True):
        assert torch.equal(cache[5], old[2])
        assert torch.equal(cache[4], old[1]) != bool(isa)
        # Each of 16 values of 2 slots in 2 heads, twice: keys and values.
        assert int((cache[4] != old[4]).sum()) == (2 * 2 * 16 * 2 if isa else 2 * 32 * 32)


def test_vllm_copies_what_the_kernel_cannot(monkeypatch):
    """Blocks that the kernels see as several, and caches that are not vLLM's."""
    called: list[Any] = []
    copy = functools.partial(
        block_copies.copy_kv_cache_blocks_inplace, lambda *arguments: called.append(arguments)
    )
    copy(caches(torch.float32), 3, COPIES)
    monkeypatch.setattr(NativeKernels, "copy_slots", lambda *arguments: False)
    copy(caches(torch.float32), 6, COPIES)
    assert [arguments[1] for arguments in called] == [3, 6]
