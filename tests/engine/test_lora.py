"""Trees do not change the output of requests with LoRA adapters, several in a batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.beam.lora import RANK, make_adapter
from tests.engine.compare import accepted_tokens, differences, speculation, tell_oracle
from tests.engine.drafters import HiddenStateDrafter
from tests.engine.prompts import prompts
from vllm_trie.lab.tiny_model import medusa_path

COUNT, NUM_TOKENS = 12, 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
# On CPUs, vLLM 0.32 computes requests without an adapter with the one in the last slot.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 4}

pytestmark = pytest.mark.usefixtures("test_drafters")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """An adapter for each request, or none."""
    assert LORA["max_lora_rank"] >= RANK
    made: list[LoRARequest | None] = [None]
    for number in (1, 2, 3):
        folders: list[Path] = [tmp_path_factory.mktemp(f"{kind}{number}") for kind in "am"]
        make_adapter(*folders, seed=number)
        made.append(LoRARequest(f"adapter-{number}", number, str(folders[0])))
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


@pytest.mark.parametrize(
    ("method", "options", "least"),
    [
        ("test_oracle", {}, 0.2),
        ("ngram_trie", {}, 0.2),
        # The heads were trained on the model without adapters: correct output, poor drafts.
        ("medusa_dynamic", {"model": str(medusa_path())}, 0.02),
    ],
    ids=["oracle", "ngram_trie", "medusa"],
)
def test_greedy(engine, adapters, expected, method, options, least):
    tell_oracle(expected)
    llm = engine(**speculation(method, 24, **options), **LORA)
    before = accepted_tokens(llm)
    assert differences(expected, run(llm, adapters)) == []
    assert accepted_tokens(llm) - before > least * COUNT * NUM_TOKENS


def test_text_is_shared_within_an_adapter_only(engine, adapters, expected):
    HiddenStateDrafter.salts.clear()
    llm = engine(**speculation("test_hidden_states", 8), **LORA)
    tell_oracle(expected)
    assert differences(expected, run(llm, adapters)) == []
    salts = Counter(HiddenStateDrafter.salts.values())
    assert list(salts.values()) == [COUNT // 4] * 4
    names = {salt and salt.partition(":")[2] for salt in salts}
    assert names == {adapter and adapter.lora_name for adapter in adapters}
