"""The union of drafters in the engine: output is plain vLLM's, whatever its parts propose."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from tests.engine.compare import (
    check_outputs_beside_aborts,
    check_same_outputs,
    generate,
    preemptions,
    speculation,
)
from tests.engine.conftest import trees_of
from tests.engine.prompts import prompts
from vllm_trie.lab.tiny_model import medusa_path

pytestmark = pytest.mark.usefixtures("test_drafters")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
COUNT = 12
# The oracle's trees put accepted nodes in all places; n-grams bring long chains.
UNION = speculation("trie_union", 48, drafters=["test_oracle", "ngram_trie"])
DEFAULT = speculation("trie_union", 32, drafters=["ngram_trie", "medusa"], model=str(medusa_path()))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_greedy(engine, expected, batch_size):
    llm = engine(**UNION)
    count = COUNT if batch_size > 1 else 4
    assert check_same_outputs(llm, expected[:count], GREEDY, batch_size) > 0.2
    assert not any(trees_of(llm).guard.failures.values())


def test_default_parts(engine, expected):
    assert check_same_outputs(engine(**DEFAULT), expected, GREEDY) > 0.01


def test_chunked_prefill(engine, expected):
    llm = engine(**UNION, max_num_batched_tokens=96, enable_chunked_prefill=True)
    assert max(len(p["prompt_token_ids"]) for p in prompts(COUNT)) > 2 * 96
    assert check_same_outputs(llm, expected, GREEDY) > 0.02


def test_preemption(engine, expected):
    llm = engine(**UNION, num_gpu_blocks_override=44, block_size=32, enable_prefix_caching=False)
    with preemptions(llm) as preempted:
        check_same_outputs(llm, expected, GREEDY)
    assert preempted


def test_seeded_sampling(engine, expected):
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=100 + i, max_tokens=40, ignore_eos=True)
        for i in range(COUNT)
    ]
    plain = generate(engine(), prompts(COUNT), params)
    assert check_same_outputs(engine(**UNION), plain, params) > 0.03


def test_abort_midway(engine, expected):
    llm = engine(**UNION)
    check_outputs_beside_aborts(llm, expected[:8], GREEDY, {1: (1, 5), 2: (2, 6)})
    union = trees_of(llm).guard.drafter
    assert not [request for request in union._states if request.startswith("abort-")]


def test_a_wrong_part_is_refused(engine):
    with pytest.raises(ValueError, match=r"'nonesuch' cannot be a part; allowed: .*ngram_trie"):
        engine(**speculation("trie_union", 32, drafters=["nonesuch"]))
