"""vLLM's block copies, which forks rely on, in every layout that it may give a KV cache.

The backends of GPUs choose among the layouts (FlashAttention and Triton take any, FlashInfer some),
and may see a block as several smaller ones. Caches are allocated and copied by vLLM's own code.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

NUM_BLOCKS = 7


def cache_config(layout: KVCacheLayout, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """As vLLM's engine core makes it for layers of one block table."""
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=NUM_BLOCKS,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
    )
    first = next(iter(specs.values()))
    spec = (
        first
        if all(layer_spec == first for layer_spec in specs.values())
        else UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=specs)
    )
    return get_kv_cache_config_from_groups(
        config, [KVCacheGroupSpec(list(specs), spec)], available_memory=1 << 30
    )


@st.composite
def caches(draw: st.DrawFn) -> tuple[KVCacheConfig, KVCacheLayout, int, int]:
    """A cache's configuration, its layout, block size and the block size of its kernels."""
    layout = draw(st.sampled_from(list(KVCacheLayout)))
    num_layers = draw(st.integers(1, 4))
    kernel_block_size = draw(st.sampled_from([1, 2, 4]))
    # vLLM splits blocks where each is one dense page.
    splits = layout.is_layer_compact and layout.is_block_compact
    block_size = kernel_block_size * (draw(st.sampled_from([1, 2, 3])) if splits else 1)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    heads = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=num_layers, max_size=num_layers))
    if draw(st.booleans()) or not layout.is_block_compact:
        heads = heads[:1] * num_layers
    latent = draw(st.booleans())
    specs: dict[str, KVCacheSpec] = {}
    for i, num_heads in enumerate(heads):
        shape = {"block_size": block_size, "head_size": 4, "dtype": dtype}
        specs[f"layers.{i}.attn"] = (
            MLAAttentionSpec(num_kv_heads=1, **shape)
            if latent
            else FullAttentionSpec(num_kv_heads=num_heads, **shape)
        )
    return cache_config(layout, specs), layout, block_size, kernel_block_size


@st.composite
def forks(draw: st.DrawFn) -> list[KVCacheBlockCopy]:
    """Copies of one step: a block may have several, and no target is the source of another."""
    order = draw(st.permutations(range(1, NUM_BLOCKS)))
    num_sources = draw(st.integers(1, 3))
    targets = order[num_sources:][: draw(st.integers(1, 3))]
    return [
        KVCacheBlockCopy(src_block_id=order[draw(st.integers(0, num_sources - 1))], dst_block_id=t)
        for t in targets
    ]


@settings(max_examples=200, deadline=None)
@given(caches(), forks())
def test_a_copy_takes_whole_blocks_of_every_layer_and_nothing_else(cache, copies):
    config, layout, block_size, kernel_block_size = cache
    views = allocate_kv_cache(config, torch.device("cpu"), layout, [kernel_block_size])
    assert config.num_blocks == NUM_BLOCKS
    generator = torch.Generator().manual_seed(1)
    expected = {}
    for view in views.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    for name, view in views.items():  # nobody's values lie over another's
        assert view.shape[0] * view.shape[2] == NUM_BLOCKS * block_size
        expected_view = view.clone()
        # Slot s of block b, for its tokens, is where the kernels look for it.
        for source, target in copies:
            for slot in range(block_size):
                part, inside = divmod(slot, kernel_block_size)
                ratio = block_size // kernel_block_size
                expected_view[target * ratio + part, :, inside] = view[
                    source * ratio + part, :, inside
                ]
        expected[name] = expected_view
    copy_kv_cache_blocks_inplace(views.values(), NUM_BLOCKS, copies)
    for name, view in views.items():
        assert torch.equal(view, expected[name]), (name, layout)
