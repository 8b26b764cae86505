"""Output with drafts is plain vLLM's where attention is not full or has no tree kernel.

Sliding windows, sinks, soft caps, attention in chunks, multimodal positions, fp8 KV caches:
the models are tiny and their weights random, but vLLM's own code for the family runs. Each family's
engine with drafts has chunked prefill, prefix caching and preemptions; the plain one has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.compare import (
    Prompt,
    differences,
    draft_tokens,
    generate,
    largest_score_error,
    preemptions,
    speculation,
    tell_oracle,
)
from tests.engine.families import (
    CHAINS,
    FAMILIES,
    PARTIAL_TREES,
    VARIANTS,
    repeated_phrases,
    take_text_for_images,
    write_model,
)
from vllm_trie.drafts.engine.verification import compaction
from vllm_trie.lab.local_engine import runner_of

pytestmark = pytest.mark.usefixtures("test_drafters", "inspect_models_here", "experts_group")
LONG: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True, "detokenize": False}
GREEDY = SamplingParams(temperature=0.0, logprobs=0, **LONG)
SEEDED = [SamplingParams(temperature=1.0, top_k=8, seed=seed, **LONG) for seed in range(4)]
PREEMPTING_STEPS = (9, 20)
DEEP = ("Qwen 2 of three layers", "Phi 3 of three layers")
"""Verified as trees by default; those with two layers repeat one token after another."""
SEVERAL_CACHE_GROUPS = ("Gemma 2", "Gemma 3", "Gemma 4", "gpt-oss", "Llama 4")
NAMES = (*(name for name in CHAINS if name != "DeepSeek V2"), *DEEP, *PARTIAL_TREES)


@pytest.fixture
def _images(monkeypatch):
    take_text_for_images(monkeypatch)


def generate_with_preemptions(llm: Any, prompts: Sequence[Prompt]) -> list[Any]:
    """Outputs in order; twice, all running requests lose their KV and start over."""
    core = llm.llm_engine
    for index, prompt in enumerate(prompts):
        core.add_request(str(index), prompt, GREEDY)
    finished: dict[str, Any] = {}
    with preemptions(llm) as preempted:
        for step in itertools.count(1):
            finished |= {o.request_id: o for o in core.step() if o.finished}
            if not core.has_unfinished_requests():
                break
            if step in PREEMPTING_STEPS:
                llm.reset_prefix_cache(reset_running_requests=True)
    assert len(preempted) > len(prompts)
    return [finished[str(index)] for index in range(len(prompts))]


def largest_gap(expected: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Largest difference between the log-probabilities of outputs with the same tokens."""
    gaps = []
    for left, right in zip(expected, outputs, strict=True):
        a, b = left.outputs[0], right.outputs[0]
        for token, p, q in zip(a.token_ids, a.logprobs, b.logprobs, strict=True):
            gaps.append(abs(p[token].logprob - q[token].logprob))
    return max(gaps)


@pytest.mark.parametrize("name", NAMES)
def test_output(engine, tmp_path, request, monkeypatch, name):
    family = (FAMILIES | VARIANTS)[name]
    if "vision_config" in family.config:
        request.getfixturevalue("_images")
    options = {
        "model": write_model(tmp_path / "model", family, repeats=True),
        "skip_tokenizer_init": True,
        "max_model_len": 192,
        "max_num_seqs": 4,
        "block_size": 32,
        "kv_cache_memory_bytes": 8 << 20,
        **family.engine,
    }
    prompts = repeated_phrases(4)
    plain = engine(**options, enable_prefix_caching=False)
    expected, sampled = generate(plain, prompts, GREEDY), generate(plain, prompts, SEEDED)
    tokens = [list(output.outputs[0].token_ids) for output in expected]
    assert len({tuple(one) for one in tokens}) == len(tokens), "the output must follow the prompt"
    pairs = {pair for one in tokens for pair in itertools.pairwise(one)}
    assert len(pairs) > len({first for first, _ in pairs}) + 4, "one token must not decide the next"

    tell_oracle(expected)
    drafts = (
        speculation("test_oracle", 12)
        if name in PARTIAL_TREES
        else speculation("ngram_trie", 8, verification="chain")
    )
    llm = engine(**options, enable_prefix_caching=True, max_num_batched_tokens=48, **drafts)
    for outputs in (
        generate_with_preemptions(llm, prompts),
        again := generate(llm, prompts, GREEDY),
    ):
        assert differences(expected, outputs) == []
        # Damage to the KV shows here before it changes a token.
        assert largest_gap(expected, outputs) < 1e-4
    assert sum(output.num_cached_tokens for output in again) > 0
    accepted, rejected = draft_tokens(llm)
    assert accepted > 40
    assert rejected > 40
    assert largest_score_error(llm, prompts, 24) < 1e-4
    if name in PARTIAL_TREES:
        tell_oracle(sampled)
        assert differences(sampled, generate(llm, prompts, SEEDED)) == []
        assert draft_tokens(llm)[0] > accepted + 40
        tell_oracle(expected)
        num_groups = len(runner_of(llm).adapter.cache_groups)
        assert (num_groups > 1) == (name in SEVERAL_CACHE_GROUPS), num_groups
    if name in SEVERAL_CACHE_GROUPS:
        # The first group's KV moves, that of the others does not.
        stock = compaction.compact
        monkeypatch.setattr(compaction, "compact", lambda groups, *rest: stock(groups[:1], *rest))
        llm.reset_prefix_cache()
        assert differences(expected, generate(llm, prompts, GREEDY)) != []
