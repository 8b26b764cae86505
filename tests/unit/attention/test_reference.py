"""Tree attention over the paged cache is what the definition says; the cache's layout is vLLM's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import run_python
from tests.unit.tree.strategies import token_trees
from vllm_trie.attention import move_slots, split_cache
from vllm_trie.attention.cache_layout import slot_elements
from vllm_trie.attention.tree_batch import query_mask


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


def write_as_vllm_does(
    cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, isa: str
) -> None:
    """vLLM's cache update on a cache in the shape that its CPU backend allocates."""
    num_blocks, num_kv_heads, block_size, _ = cache.shape
    halves = cache.view(num_blocks, num_kv_heads, 2 * block_size, -1)
    key_cache, value_cache = halves.chunk(2, dim=2)
    torch.ops._C.cpu_attn_reshape_and_cache(
        keys, values, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto"
    )


def write(
    cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, isa: str
) -> None:
    """Put keys and values [n, num_kv_heads, head_size] into slots."""
    block_size, head_size = cache.shape[2], keys.shape[2]
    elements = slot_elements(isa, block_size, head_size)[slots % block_size]
    cache.flatten(2)[slots[:, None] // block_size, :, elements] = torch.cat(
        [keys, values], dim=2
    ).transpose(1, 2)


def check_layout(isa: str, dtype: torch.dtype, block_size: int, head_size: int) -> None:
    """Moving KV gives the cache that vLLM's update makes of it at the new slots."""
    num_blocks, num_kv_heads, num_tokens = 5, 2, 40
    # Full of NaN: nothing may be read that was not written.
    shape = (num_blocks, num_kv_heads, block_size, 2 * head_size)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    ours = cache.clone()
    keys, values = torch.randn(2, num_tokens, num_kv_heads, head_size).to(dtype)
    slots = torch.randperm(num_blocks * block_size)
    write_as_vllm_does(cache, slots[:num_tokens], keys, values, isa)
    write(ours, slots[:num_tokens], keys, values, isa)
    assert not ours.isnan().all()
    assert torch.equal(cache.nan_to_num(-99.0), ours.nan_to_num(-99.0))
    if isa != "amx":
        split_keys, split_values = split_cache(ours)
        block, offset = slots[:num_tokens] // block_size, slots[:num_tokens] % block_size
        assert torch.equal(split_keys[block, :, :, offset], keys)
        assert torch.equal(split_values[block, :, offset], values)

    source, target = slots[:12], torch.cat([slots[3:9], slots[num_tokens:][:6]])
    write_as_vllm_does(cache, target, keys[:12], values[:12], isa)
    move_slots(ours, source, target, isa)
    assert torch.equal(cache.nan_to_num(-99.0), ours.nan_to_num(-99.0))


LAYOUTS = [
    (isa, dtype, block_size, head_size)
    for isa in ("vec", "vec16")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for block_size in ((32, 64, 128) if isa == "vec" else (16, 48))
    for head_size in ((64, 96, 128) if isa == "vec" else (64, 80, 112))
]


@pytest.mark.parametrize(("isa", "dtype", "block_size", "head_size"), LAYOUTS)
def test_slots_are_where_vllm_writes_them(vllm_operations, isa, dtype, block_size, head_size):
    check_layout(isa, dtype, block_size, head_size)


AMX_SCRIPT = """
from importlib.util import find_spec
from pathlib import Path
import torch
from tests.unit.attention.test_reference import check_layout
torch.ops.load_library(str(Path(find_spec("vllm").origin).parent / "_C.abi3.so"))
for block_size in (32, 96, 128):
    for head_size in (32, 64, 96, 128, 256):
        check_layout("amx", torch.bfloat16, block_size, head_size)
"""


def test_slots_are_where_vllm_writes_them_for_amx(vllm_operations):
    """In a process of its own, as vLLM's library for such processors alone has that kernel; what
    writes the cache needs none of their instructions."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("this CPU has no AVX-512, which vLLM's library needs")
    run_python("-c", AMX_SCRIPT)
