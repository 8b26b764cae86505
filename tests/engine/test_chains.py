"""Chains: drafts without branches that vLLM's own attention and rejection sampler verify."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.sample.rejection_sampler import RejectionSampler

from tests.engine.compare import (
    accepted_tokens,
    check_outputs_beside_aborts,
    check_same_outputs,
    differences,
    generate,
    plain_outputs,
    preemptions,
    speculation,
)
from tests.engine.prompts import prompts
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.lab.local_engine import runner_of, verifier_of
from vllm_trie.lab.tiny_model import medusa_path

pytestmark = pytest.mark.usefixtures("test_drafters")
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
COUNT = 16
METHODS = {
    "test_oracle": {},
    "trie_union": {"model": str(medusa_path()), "drafters": ["ngram", "medusa"]},
}


def chains(method: str, num_tokens: int = 8, **options):
    return speculation(method, num_tokens, verification="chain", **options)


@pytest.mark.parametrize("method", METHODS)
def test_greedy(engine, expected, method):
    llm = engine(**chains(method, **METHODS[method]))
    assert check_same_outputs(llm, expected, GREEDY, 8) > 0.15


def test_attention_and_verification_are_vllms(engine, expected, monkeypatch):
    # After an engine with trees in the same process, whose attention replaces vLLM's.
    generate(engine(**speculation("test_oracle", 8)), prompts(1), GREEDY)
    llm = engine(**chains("test_oracle", 9))
    layers = runner_of(llm).compilation_config.static_forward_context.values()
    assert {type(layer.impl) for layer in layers if hasattr(layer, "impl")} == {
        CPUAttentionBackendImpl
    }
    verified = []
    forward = RejectionSampler.forward
    monkeypatch.setattr(
        RejectionSampler, "forward", lambda *a, **k: (verified.append(1), forward(*a, **k))[1]
    )
    assert differences(expected[:4], generate(llm, prompts(4), GREEDY)) == []
    assert len(verified) > 10
    for left_out in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):  # by vLLM's rejection sampler
        with pytest.raises((ValueError, VLLMValidationError), match="min_p and logit_bias"):
            generate(llm, prompts(1), SamplingParams(**left_out))


@pytest.mark.parametrize("verification", ["chain", "tree"])
@pytest.mark.parametrize("num_requests", [3, 1])
def test_logprobs_of_listed_tokens(engine, expected, verification, num_requests):
    """Beside requests with logprobs of other tokens, and with none; and alone."""
    wishes = ({"logprob_token_ids": [300, 5, 17]}, {"logprobs": 2}, {})[:num_requests]
    greedy = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**greedy, **wish) for wish in wishes]
    plain = generate(engine(), prompts(num_requests), params)
    llm = engine(**speculation("test_oracle", 9, verification=verification))
    before = accepted_tokens(llm)
    outputs = generate(llm, prompts(num_requests), params)
    assert accepted_tokens(llm) > before
    assert differences(plain, outputs) == []
    # Where a request lists tokens, plain vLLM gives the others theirs beside the sampled one.
    for left, right in zip(plain[:2], outputs[:2], strict=True):
        a, b = left.outputs[0].cumulative_logprob, right.outputs[0].cumulative_logprob
        assert b == pytest.approx(a, abs=1e-3)
    for a, b in zip(plain[0].outputs[0].logprobs, outputs[0].outputs[0].logprobs, strict=True):
        logprobs = {token: logprob.logprob for token, logprob in a.items()}
        assert {300, 5, 17} <= logprobs.keys()
        assert {token: entry.logprob for token, entry in b.items()} == pytest.approx(
            logprobs, abs=1e-4
        )


def test_little_room(engine, expected):
    """Prompts in parts, preemptions, a prefix cache, and requests without drafts beside others."""
    llm = engine(
        **chains("ngram_trie", 16, node_budget="adaptive"),
        max_num_batched_tokens=48,
        max_model_len=640,
        num_gpu_blocks_override=40,
        block_size=32,
    )
    params = [GREEDY.clone() for _ in expected]
    for quiet in params[::3]:
        quiet.extra_args = {"speculation": False}
    with preemptions(llm) as preempted:
        check_same_outputs(llm, expected, params)
    assert preempted
    assert check_same_outputs(llm, expected[:8], GREEDY, 4) > 0.1


def test_length_limit_and_aborts(engine):
    limit = {"max_model_len": 160}
    some = [{"prompt_token_ids": p["prompt_token_ids"][:140]} for p in prompts(12)]
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    outputs = plain_outputs(engine(**limit), some, endless)
    llm = engine(**chains("test_oracle"), **limit)
    check_same_outputs(llm, outputs, endless)
    check_outputs_beside_aborts(llm, outputs, endless, {2: [1, 5], 3: [3, 7]})
    assert not [r for r in verifier_of(llm)._stored_trees if r.startswith("abort-")]


def counted(calls: Counter[str], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[method.__name__] += 1
        return method(*args, **kwargs)

    return call


def test_kv_connector(engine, expected, tmp_path, monkeypatch):
    """KV that vLLM's connector writes and reads, with drafts and in steps that want none."""
    answers, calls = itertools.cycle([True] * 3 + [False] * 3), Counter[str]()
    monkeypatch.setattr(NodeBudget, "should_draft", lambda self, num_rows: next(answers))
    for name in ("start_load_kv", "wait_for_save"):
        method = getattr(ExampleConnector, name)
        monkeypatch.setattr(ExampleConnector, name, counted(calls, method))
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    llm = engine(
        **chains("ngram_trie", 16, node_budget="adaptive"),
        kv_transfer_config=connector,
        block_size=32,
        enable_prefix_caching=False,
    )
    try:
        for _ in range(2):
            assert check_same_outputs(llm, expected, GREEDY, 4) > 0.1
            assert list(tmp_path.rglob("*.safetensors"))
        assert 0 < calls["start_load_kv"] == calls["wait_for_save"], "each step ends with a save"
    finally:
        ensure_kv_transfer_shutdown()
