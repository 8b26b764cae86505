"""Greedy output with trees is that of plain decoding for decoders of several families.

The models are tiny and their weights random, but vLLM's own code for the family runs: its rotary
embeddings or learned positions, its norms and biases, its layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.compare import (
    accepted_tokens,
    check_same_outputs,
    generate,
    speculation,
    tell_oracle,
)
from tests.engine.families import FAMILIES, TREES, VARIANTS, write_model

pytestmark = pytest.mark.usefixtures("test_drafters", "inspect_models_here", "experts_group")

NUM_TOKENS = 40
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}


def chosen_prompts() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(3, 128, 12 + i).tolist()} for i in range(6)]


def check(engine: Any, model: str) -> None:
    llm = engine(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=16 << 20,
        enable_prefix_caching=False,
        **speculation("test_oracle", 16),
    )
    plain = SamplingParams(**GREEDY, extra_args={"speculation": False})
    expected = generate(llm, chosen_prompts(), plain)
    tokens = [output.outputs[0].token_ids for output in expected]
    assert len({tuple(one) for one in tokens}) == len(tokens), "the output must follow the prompt"
    assert min(len(set(one)) for one in tokens) > 4, "the output must follow what was said"
    assert accepted_tokens(llm) == 0
    tell_oracle(expected)
    assert check_same_outputs(llm, expected, SamplingParams(**GREEDY)) > 0.2


@pytest.mark.parametrize("family", TREES)
def test_greedy(engine, tmp_path, family):
    check(engine, write_model(tmp_path / "model", FAMILIES[family]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(engine, tmp_path, variant):
    check(engine, write_model(tmp_path / "model", VARIANTS[variant]))
