"""The CPU worker's copies of tail blocks, against vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from vllm_trie.searches.engine.worker import block_copies

COPIES = [KVCacheBlockCopy(1, 4), KVCacheBlockCopy(2, 5), KVCacheBlockCopy(2, 0)]
KINDS = {
    "keys and values": [torch.rand(6, 2, 32, 32) for _ in range(2)],
    "one of them quantized": [torch.rand(6, 2, 32, 32), torch.rand(6, 2, 32, 32).char()],
    "latent": [torch.rand(6, 1, 16, 576)],
    "of two sizes in one piece of memory": list(torch.rand(6, 96).split([32, 64], dim=1)),
}


def copied(caches: list[torch.Tensor], num_blocks: int) -> tuple[list[torch.Tensor], list[Any]]:
    """Copies of the caches after the worker's copy, the last twice, and calls of vLLM's own."""
    called: list[Any] = []
    result = [cache.clone(memory_format=torch.preserve_format) for cache in caches]
    block_copies.copy_kv_cache_blocks_inplace(
        lambda *arguments: called.append(arguments), [*result, result[-1]], num_blocks, COPIES
    )
    return result, called


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_copied_whole(kind):
    result, called = copied(KINDS[kind], 6)
    assert not called
    for cache, before in zip(result, KINDS[kind], strict=True):
        assert torch.equal(cache, before[[2, 1, 2, 3, 1, 2]])


def test_vllm_copies_other_caches():
    """Blocks that the kernels see as several, and blocks in pieces."""
    assert copied(KINDS["latent"], 3)[1]
    assert copied([torch.rand(2, 6, 32).transpose(0, 1)], 6)[1]
