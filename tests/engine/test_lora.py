"""Trees do not change the output of requests with LoRA adapters, several in a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.beam.lora import make_adapters
from tests.engine.compare import accepted_tokens, differences, speculation, tell_oracle
from tests.engine.drafters import HiddenStateDrafter
from tests.engine.prompts import prompts

COUNT, NUM_TOKENS = 12, 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
# On CPUs, vLLM 0.32 computes requests without an adapter with the one in the last slot.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 4}

pytestmark = pytest.mark.usefixtures("test_drafters")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """An adapter for each request, or none."""
    made = [None, *make_adapters(tmp_path_factory.mktemp("adapters"), 3)]
    return [made[i % len(made)] for i in range(COUNT)]


def run(llm: Any, adapters: list[LoRARequest | None]) -> list[Any]:
    return llm.generate(prompts(COUNT), GREEDY, lora_request=adapters, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(_engines, adapters):
    """Plain vLLM's outputs, each of which depends on its adapter."""
    llm = _engines(**LORA)
    outputs = run(llm, adapters)
    without = run(llm, [None] * COUNT)
    same = [
        a.outputs[0].token_ids == b.outputs[0].token_ids
        for a, b in zip(outputs, without, strict=True)
    ]
    assert all(s for s, adapter in zip(same, adapters, strict=True) if adapter is None)
    assert sum(same) < COUNT // 2
    return outputs


def test_greedy_and_text_is_shared_within_an_adapter_only(engine, adapters, expected):
    HiddenStateDrafter.salts.clear()
    llm = engine(**speculation("test_hidden_states", 24), **LORA)
    tell_oracle(expected)
    assert differences(expected, run(llm, adapters)) == []
    assert accepted_tokens(llm) > 0.2 * COUNT * NUM_TOKENS
    salts = Counter(HiddenStateDrafter.salts.values())
    assert list(salts.values()) == [COUNT // 4] * 4
    names = {salt and salt.partition(":")[2] for salt in salts}
    assert names == {adapter and adapter.lora_name for adapter in adapters}
