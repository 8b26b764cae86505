"""Copies of slots between blocks: the kernel, its twin, and vLLM's own copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.attention.paged_cases import laid_out
from vllm_trie.attention import choose_kernels, split_cache

copy_slots = choose_kernels().copy_slots
NUM_BLOCKS = 9


def copy_with_torch(caches: list[torch.Tensor], copies: np.ndarray) -> None:
    """The readable twin of the kernel."""
    for cache in caches:
        keys, values = split_cache(cache)
        for source, target, first, end in copies.tolist():
            keys[target, :, :, first:end] = keys[source, :, :, first:end]
            values[target, :, first:end] = values[source, :, first:end]


@st.composite
def copies(draw: st.DrawFn, block_size: int) -> np.ndarray:
    """int64 [n, 4]: no target is a source, no target twice."""
    blocks = draw(st.permutations(range(NUM_BLOCKS)))
    targets, sources = blocks[:5], blocks[5:]
    rows = []
    for target in targets[: draw(st.integers(0, 5))]:
        first = draw(st.integers(0, block_size - 1))
        end = draw(st.integers(first + 1, block_size))
        rows.append((draw(st.sampled_from(sources)), target, first, end))
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_kernel_does_what_its_twin_does(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    block_size = data.draw(st.sampled_from([16, 32, 128]))
    in_pairs = dtype == torch.bfloat16 and block_size > 16
    isa = data.draw(st.sampled_from(["vec", "amx"])) if in_pairs else "vec"
    head_size = 32 if isa == "amx" else 16
    shape = (NUM_BLOCKS, data.draw(st.integers(1, 3)), block_size, 2 * head_size)
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    expected = [cache.clone() for cache in caches]
    asked = data.draw(copies(block_size))
    copy_with_torch(expected, asked)
    caches = [laid_out(cache, isa) for cache in caches]
    assert copy_slots(caches, asked, isa)
    for cache, expected_cache in zip(caches, expected, strict=True):
        assert torch.equal(cache, laid_out(expected_cache, isa))


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(torch.zeros(4, 2, 32, 32, dtype=torch.uint8), id="quantized"),
        pytest.param(torch.zeros(4, 32, 2, 32).transpose(1, 2), id="another layout"),
        pytest.param(torch.zeros(2, 4, 2, 32, 32), id="keys and values apart"),
    ],
)
def test_other_caches_are_left_alone(cache):
    assert not copy_slots([cache], np.array([[0, 1, 0, 4]]))
    assert not copy_slots([torch.zeros(4, 2, 32, 32), cache], np.array([[0, 1, 0, 4]]))
