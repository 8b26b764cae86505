"""Each attention kernel in the engine, and how a step's rows are shared among them."""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams

from tests.engine.compare import (
    differences,
    generate,
    register_test_drafters,
    speculation,
    tell_oracle,
)
from tests.engine.prompts import prompts
from vllm_trie.attention import choose_kernels, kernels
from vllm_trie.vllm_hooks import cpu_attention

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def _test_drafters(monkeypatch):
    register_test_drafters(monkeypatch)


@pytest.fixture(scope="module")
def expected(_engines):
    outputs = generate(_engines(), prompts(12), GREEDY)
    tell_oracle(outputs)
    return outputs


@pytest.fixture
def no_compiler(monkeypatch):
    choose_kernels.cache_clear()
    monkeypatch.setattr(kernels, "load_kernels", lambda: None)
    assert choose_kernels().native is None
    yield
    choose_kernels.cache_clear()


def _some_without_drafts() -> list[SamplingParams]:
    params = [GREEDY.clone() for _ in range(12)]
    for quiet in params[1::3]:
        quiet.extra_args = {"speculation": False}
    return params


@pytest.mark.parametrize("num_nodes", [24, 100])
def test_without_a_compiler(engine, expected, no_compiler, num_nodes):
    llm = engine(**speculation("test_oracle", num_nodes))
    outputs = generate(llm, prompts(12), _some_without_drafts(), 6)
    assert differences(expected, outputs) == []


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_sizes(engine, expected, block_size):
    llm = engine(**speculation("test_oracle", 24), block_size=block_size)
    assert differences(expected, generate(llm, prompts(12), GREEDY, 6)) == []


def test_several_threads(engine, expected):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        llm = engine(**speculation("test_oracle", 24))
        assert differences(expected, generate(llm, prompts(12), GREEDY, 6)) == []
    finally:
        torch.set_num_threads(before)


def test_no_row_is_computed_twice(engine, expected, monkeypatch):
    """In a mixed batch the stock kernel gets exactly the rows that have no tree."""
    llm = engine(**speculation("test_oracle", 24))
    counts = {"mixed": 0, "gathered": 0}
    pending: list[int] = []
    stock = cpu_attention.CPUAttentionBackendImpl.forward
    ours = cpu_attention.tree_attention
    split = cpu_attention.rest_of_batch

    def stock_forward(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        if metadata is not None:
            assert len(query) >= metadata.num_actual_tokens
            assert int(metadata.query_start_loc[-1]) == metadata.num_actual_tokens
            pending.append(metadata.num_actual_tokens)
        return stock(self, layer, query, key, value, kv_cache, metadata, output, *scales)

    def tree_attention(query, kv_cache, block_table, trees, scale, output):
        own = sum(row.num_queries for row in trees.rows)
        if trees.covers_batch:
            assert own == len(query)
        else:
            counts["mixed"] += 1
            assert own + pending[-1] == len(query)
        ours(query, kv_cache, block_table, trees, scale, output)

    def rest_of_batch(metadata, trees):
        rest = split(metadata, trees)
        counts["gathered"] += not isinstance(rest.rows, slice)
        return rest

    monkeypatch.setattr(cpu_attention.CPUAttentionBackendImpl, "forward", stock_forward)
    monkeypatch.setattr(cpu_attention, "tree_attention", tree_attention)
    monkeypatch.setattr(cpu_attention, "rest_of_batch", rest_of_batch)
    outputs = generate(llm, prompts(12), _some_without_drafts(), 6)
    assert differences(expected, outputs) == []
    assert counts["mixed"] > 20
    assert counts["gathered"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(engine, dtype):
    """Rounding may turn a near tie, so most outputs are plain vLLM's, not all."""
    some = prompts(12)
    plain = generate(engine(dtype=dtype), some, GREEDY)
    tell_oracle(plain)
    found = generate(engine(dtype=dtype, **speculation("test_oracle", 24)), some, GREEDY, 6)
    assert len(differences(plain, found)) <= 4
