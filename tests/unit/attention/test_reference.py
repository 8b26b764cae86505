"""Tree attention over the paged cache is what the definition says; the cache's layout is vLLM's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import token_trees
from vllm_trie.attention import move_slots, split_cache
from vllm_trie.attention.cache_layout import SUPPORTED_ISAS
from vllm_trie.attention.tree_batch import query_mask


def filled_cache(
    num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """A cache full of NaN: nothing may be read that was not written."""
    shape = (num_blocks, num_kv_heads, block_size, 2 * head_size)
    return torch.full(shape, torch.nan, dtype=dtype)


def write(
    cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Put keys and values [n, num_kv_heads, head_size] into slots."""
    block_size = cache.shape[2]
    for slot, key, value in zip(slots.tolist(), keys, values, strict=True):
        block, offset = divmod(slot, block_size)
        cache_keys, cache_values = split_cache(cache)
        cache_keys[block, :, :, offset] = key
        cache_values[block, :, offset] = value


@given(token_trees(max_nodes=150), st.integers(0, 5))
def test_query_mask(tree, committed):
    num_queries = committed + tree.num_nodes
    mask = query_mask(tree.ancestor_words(), num_queries)
    assert mask.shape == (num_queries, num_queries)
    assert np.array_equal(mask[committed:, committed:], tree.ancestor_mask())
    assert np.array_equal(mask[:committed, :committed], np.tri(committed, dtype=bool))
    assert mask[committed:, :committed].all()
    assert not mask[:committed, committed:].any()


# -- layout: against the operation with which vLLM itself writes the cache -------------------------


@pytest.fixture(scope="module")
def write_as_vllm_does(vllm_operations):
    """vLLM's cache update on a cache in the shape that its CPU backend allocates."""

    def update(
        cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, isa: str
    ) -> None:
        num_blocks, num_kv_heads, block_size, _ = cache.shape
        halves = cache.view(num_blocks, num_kv_heads, 2 * block_size, -1)
        key_cache, value_cache = halves.chunk(2, dim=2)
        torch.ops._C.cpu_attn_reshape_and_cache(
            keys, values, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto"
        )

    return update


LAYOUTS = [
    (isa, dtype, block_size, head_size)
    for isa in SUPPORTED_ISAS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for block_size in ((32, 64, 128) if isa == "vec" else (16, 48))
    for head_size in ((64, 96, 128) if isa == "vec" else (64, 80, 112))
]


@pytest.mark.parametrize(("isa", "dtype", "block_size", "head_size"), LAYOUTS)
def test_slots_are_where_vllm_writes_them(write_as_vllm_does, isa, dtype, block_size, head_size):
    """Moving KV gives the cache that vLLM's update makes of it at the new slots."""
    num_blocks, num_kv_heads, num_tokens = 5, 2, 40
    cache = filled_cache(num_blocks, num_kv_heads, block_size, head_size, dtype)
    ours = cache.clone()
    keys, values = torch.randn(2, num_tokens, num_kv_heads, head_size).to(dtype)
    slots = torch.randperm(num_blocks * block_size)
    write_as_vllm_does(cache, slots[:num_tokens], keys, values, isa)
    write(ours, slots[:num_tokens], keys, values)
    assert not ours.isnan().all()
    assert torch.equal(cache.nan_to_num(-99.0), ours.nan_to_num(-99.0))

    source, target = slots[:12], torch.cat([slots[3:9], slots[num_tokens:][:6]])
    write_as_vllm_does(cache, target, keys[:12], values[:12], isa)
    move_slots(ours, source, target)
    assert torch.equal(cache.nan_to_num(-99.0), ours.nan_to_num(-99.0))
