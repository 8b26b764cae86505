"""Greedy output with trees is that of plain decoding for decoders of several families.

The models are tiny and their weights random, but the code that runs is vLLM's own for the family:
its rotary embeddings or learned positions, its norms and biases, its shape of a layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.compare import (
    accepted_tokens,
    differences,
    generate,
    register_test_drafters,
    speculation,
    tell_oracle,
)
from tests.engine.families import SUPPORTED

NUM_TOKENS = 60
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False}


@pytest.fixture(autouse=True)
def _test_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    register_test_drafters(monkeypatch)


def write_model(folder: Path, values: dict[str, Any]) -> str:
    """A model folder whose weights make every token depend on those before it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            # Small embeddings, so that the layers have most of the say.
            torch.nn.init.normal_(weight, std=0.04 if "embed" in name or "wte" in name else 0.25)
    model.save_pretrained(folder)
    return str(folder)


def chosen_prompts() -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(3, 128, 12 + i).tolist()} for i in range(6)]


@pytest.mark.parametrize("family", SUPPORTED)
def test_greedy(engine: Any, tmp_path: Path, family: str) -> None:
    llm = engine(
        model=write_model(tmp_path / "model", SUPPORTED[family]),
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
    found = generate(llm, chosen_prompts(), SamplingParams(**GREEDY))
    assert differences(expected, found) == []
    assert accepted_tokens(llm) > 0.2 * len(tokens) * NUM_TOKENS
