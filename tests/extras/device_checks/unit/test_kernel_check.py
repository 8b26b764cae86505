"""The check of the GPU kernel: its oracle, and that its inputs make mistakes large."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.oracles.attention import tree_attention_in_torch
from vllm_trie.attention import TreeRow, build_tree_batch, split_cache
from vllm_trie.extras.device_checks.kernel_check import (
    BATCHES,
    TOLERANCE,
    LayerShape,
    RequestShape,
    Step,
    fill_cache,
    random_step,
    relative_error,
)

SHAPE = LayerShape(4, 2, 64, 16, torch.float32)


def step_of(requests, shape: LayerShape = SHAPE, seed: int = 0) -> Step:
    return random_step(shape, requests, 64, np.random.default_rng(seed))


@pytest.mark.parametrize("requests", BATCHES)
def test_expected_is_what_the_portable_kernel_gives(requests):
    step = step_of(requests)
    gpu_cache = torch.empty(64, 2, 16, 2 * 64)
    fill_cache(gpu_cache, step)
    cpu_cache = torch.empty(64, 2, 16, 2 * 64, dtype=torch.float64)
    keys, values = split_cache(cpu_cache)
    keys.copy_(gpu_cache[..., :64].transpose(2, 3))
    values.copy_(gpu_cache[..., 64:])
    # Requests without a tree are trees without nodes to the portable kernel.
    lengths = np.diff(step.starts).tolist()
    words = dict(
        zip([row.batch_index for row in step.trees.rows], step.trees.ancestor_words, strict=True)
    )
    rows = [
        TreeRow(i, int(step.starts[i]), lengths[i], request.num_nodes, request.seq_len)
        for i, request in enumerate(requests)
    ]
    none = np.empty((0, 1), dtype=np.uint64)
    trees = build_tree_batch(rows, [words.get(i, none) for i in range(len(rows))], len(step.query))
    output = torch.zeros(step.query.shape, dtype=torch.float64)
    table = torch.from_numpy(step.block_table)
    tree_attention_in_torch(step.query.double(), cpu_cache, table, trees, step.scale, output)
    assert relative_error(output, step.expected(), step) < 1e-12


@pytest.mark.parametrize("num_heads", [1, 4])
@pytest.mark.parametrize("head_size", [32, 64, 128, 256])
def test_a_wrong_mask_shows(num_heads, head_size):
    shape = LayerShape(num_heads, 1, head_size, 16, torch.float32)
    for seed, requests in enumerate(BATCHES[1:4]):
        step = step_of(requests, shape, seed)
        causal = np.full_like(step.trees.word_array, ~np.uint64(0))
        wrong = replace(step, trees=replace(step.trees, word_array=causal))
        assert relative_error(wrong.expected(), step.expected(), step) > 0.2


def test_one_wrong_block_shows():
    step = step_of([RequestShape(600, 1, 32)])
    values = step.values.clone()
    values[320:336] = 0
    wrong = replace(step, values=values)
    assert relative_error(wrong.expected(), step.expected(), step) > 0.2


def test_nan_is_an_error_however_large_the_rest():
    step = step_of([RequestShape(3, 1, 4)])
    output = step.expected()
    assert relative_error(output, step.expected(), step) == 0.0
    output[0, 0, 0] = torch.nan
    assert relative_error(output, step.expected(), step) > max(TOLERANCE.values())
