"""The attention kernel in the engine, and how a step's rows are shared with vLLM's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.compare import (
    differences,
    generate,
    plain_outputs,
    speculation,
    tell_oracle,
)
from tests.engine.prompts import prompts
from vllm_trie.drafts.engine.attention import cpu as cpu_attention

pytestmark = pytest.mark.usefixtures("test_drafters")
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
COUNT = 16


def _some_without_drafts() -> list[SamplingParams]:
    params = [GREEDY.clone() for _ in range(12)]
    for quiet in params[1::3]:
        quiet.extra_args = {"speculation": False}
    return params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chains_take_the_tree_kernel(engine, dtype, monkeypatch):
    """Drafts of one path too: the native kernel is faster there, and rows without drafts stay."""
    seen = {"chains": 0, "plain": 0}
    ours = cpu_attention.tree_attention
    stock = cpu_attention.CPUAttentionBackendImpl.forward

    def tree_attention(query, kv_cache, block_table, trees, *rest):
        seen["chains"] += len(trees.rows)
        ours(query, kv_cache, block_table, trees, *rest)

    def stock_forward(self, layer, query, key, value, kv_cache, metadata, *rest, **named):
        if metadata is not None:
            seen["plain"] += metadata.max_query_len == 1
        return stock(self, layer, query, key, value, kv_cache, metadata, *rest, **named)

    monkeypatch.setattr(cpu_attention, "tree_attention", tree_attention)
    monkeypatch.setattr(cpu_attention.CPUAttentionBackendImpl, "forward", stock_forward)
    plain = plain_outputs(engine(dtype=dtype), prompts(12), GREEDY)
    llm = engine(dtype=dtype, **speculation("test_oracle", 1))
    outputs = generate(llm, prompts(12), _some_without_drafts(), 6)
    assert len(differences(plain, outputs)) <= (0 if dtype == "float32" else 4)
    assert seen["chains"] > 100
    assert seen["plain"] > 0


def test_no_row_is_computed_twice(engine, expected, monkeypatch):
    """In a mixed batch the stock kernel gets exactly the rows that have no tree."""
    llm = engine(**speculation("test_oracle", 24))
    counts = {"mixed": 0, "gathered": 0}
    pending: list[int] = []
    stock = cpu_attention.CPUAttentionBackendImpl.forward
    ours = cpu_attention.tree_attention
    split = cpu_attention.plain_requests

    def stock_forward(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        if metadata is not None:
            assert len(query) >= metadata.num_actual_tokens
            assert int(metadata.query_start_loc[-1]) == metadata.num_actual_tokens
            pending.append(metadata.num_actual_tokens)
        return stock(self, layer, query, key, value, kv_cache, metadata, output, *scales)

    def tree_attention(query, kv_cache, block_table, trees, scale, output, *biases):
        num_queries = sum(row.num_queries for row in trees.rows)
        if trees.covers_batch:
            assert num_queries == len(query)
        else:
            counts["mixed"] += 1
            assert num_queries + pending[-1] == len(query)
        ours(query, kv_cache, block_table, trees, scale, output, *biases)

    def plain_requests(metadata, trees):
        plain = split(metadata, trees)
        counts["gathered"] += not isinstance(plain.tokens, slice)
        return plain

    monkeypatch.setattr(cpu_attention.CPUAttentionBackendImpl, "forward", stock_forward)
    monkeypatch.setattr(cpu_attention, "tree_attention", tree_attention)
    monkeypatch.setattr(cpu_attention, "plain_requests", plain_requests)
    outputs = generate(llm, prompts(12), _some_without_drafts(), 6)
    assert differences(expected[:12], outputs) == []
    assert counts["mixed"] > 20
    assert counts["gathered"] > 0


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    """A small model with linear biases (ALiBi); random weights, large enough to say much."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "n_layer": 2, "n_head": 4}
    model = BloomForCausalLM(BloomConfig(**sizes, initializer_range=0.2, eos_token_id=2))
    path = tmp_path_factory.mktemp("bloom")
    model.save_pretrained(path)
    return str(path)


def _bloom_outputs(engine, bloom: str, **options) -> list:
    settings = {"model": bloom, "skip_tokenizer_init": True, "max_model_len": 512}
    rng = np.random.default_rng(0)
    some = [{"prompt_token_ids": rng.integers(3, 500, 90 + i).tolist()} for i in range(8)]
    return generate(engine(**settings, **options), some, GREEDY, 4)


@pytest.fixture
def bloom_expected(engine, bloom):
    outputs = _bloom_outputs(engine, bloom)
    assert len({token for o in outputs for token in o.outputs[0].token_ids}) > 20
    tell_oracle(outputs)
    return outputs


def test_linear_biases(engine, bloom, bloom_expected):
    outputs = _bloom_outputs(engine, bloom, **speculation("test_oracle", 24))
    assert differences(bloom_expected, outputs) == []


def test_outputs_without_the_biases_are_others(engine, bloom, bloom_expected, monkeypatch):
    ours = cpu_attention.tree_attention
    monkeypatch.setattr(cpu_attention, "tree_attention", lambda *args: ours(*args[:6]))
    outputs = _bloom_outputs(engine, bloom, **speculation("test_oracle", 24))
    assert len(differences(bloom_expected, outputs)) > 4
