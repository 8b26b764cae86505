"""Engines with little room and demanding requests: greedy output does not change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from safetensors.torch import load_file
from vllm import SamplingParams

from tests.engine.compare import (
    accepted_tokens,
    check_same_outputs,
    differences,
    generate,
    plain_outputs,
    speculation,
    tell_oracle,
)
from tests.engine.prompts import prompts
from vllm_trie.lab.tiny_model import model_path

COUNT, NODES = 8, 32
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 80, "ignore_eos": True}
TREES = speculation("test_oracle", NODES)

pytestmark = pytest.mark.usefixtures("test_drafters")


@pytest.fixture(scope="module")
def expected(_engines):
    return generate(_engines(), prompts(COUNT), SamplingParams(**GREEDY))


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": NODES, "enable_chunked_prefill": True},
        {"long_prefill_token_threshold": NODES},
    ],
    ids=lambda options: next(iter(options)),
)
def test_prompts_with_one_token_to_compute(engine, options):
    """vLLM would pad them to the size of a full draft, which does not fit here."""
    options = {**options, "block_size": 32, "max_num_seqs": 4}
    some = [{"prompt_token_ids": p["prompt_token_ids"][:33]} for p in prompts(4)]
    params = SamplingParams(**GREEDY)
    plain = plain_outputs(engine(**options), some, params)
    llm = engine(**TREES, **options)
    check_same_outputs(llm, plain, params)
    # Again, next to a running request; all tokens but the last are in the prefix cache.
    core = llm.llm_engine
    for name in ("runs", 0, 1, 2, 3):
        core.add_request(f"cached-{name}", some[0 if name == "runs" else name], params)
        core.step()
    finished = {}
    for _ in range(2000):
        finished |= {o.request_id: o for o in core.step() if o.finished}
        if not core.has_unfinished_requests():
            break
    cached = [finished[f"cached-{index}"] for index in range(4)]
    assert differences(plain, cached) == []
    assert cached[0].num_cached_tokens == 32


def test_short_length_limit(engine):
    """Prompts up to the limit, which leaves room for a node or two at most."""
    length = 6
    options = {"max_model_len": length, "max_num_seqs": 4}
    some = [
        {"prompt_token_ids": p["prompt_token_ids"][: max(1, length - 1 - i)]}
        for i, p in enumerate(prompts(6))
    ]
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    plain = plain_outputs(engine(**options), some, endless)
    check_same_outputs(engine(**TREES, **options), plain, endless)


def test_logprobs_of_prompt_and_output(engine):
    """Of the whole vocabulary, with prompts that come in several parts."""
    options = {"max_logprobs": -1, "max_num_batched_tokens": 32, "enable_chunked_prefill": True}
    some = [{"prompt_token_ids": p["prompt_token_ids"][:50]} for p in prompts(3)]
    short = {**GREEDY, "max_tokens": 20, "detokenize": False}
    params = SamplingParams(**short, prompt_logprobs=-1, logprobs=-1)
    plain = plain_outputs(engine(**options), some, params)
    tree = engine(**TREES, **options)
    outputs = generate(tree, some, params)
    assert differences(plain, outputs) == []
    assert accepted_tokens(tree) > 20
    for left, right in zip(plain, outputs, strict=True):
        totals = [output.outputs[0].cumulative_logprob for output in (left, right)]
        assert totals[0] == pytest.approx(totals[1], abs=1e-3)
        assert left.prompt_logprobs[0] is right.prompt_logprobs[0] is None
        for a, b in zip(
            [*left.prompt_logprobs[1:], *left.outputs[0].logprobs],
            [*right.prompt_logprobs[1:], *right.outputs[0].logprobs],
            strict=True,
        ):
            assert len(a) == len(b) == 2048
            ranks = [{t: p.rank for t, p in of.items() if p.rank < 5} for of in (a, b)]
            assert ranks[0] == ranks[1]
            errors = {token: abs(a[token].logprob - b[token].logprob) for token in a}
            assert max(errors.values()) < 1e-3
            assert max(errors[token] for token in ranks[0]) < 1e-4


def test_several_reasons_to_stop_in_one_path(engine, expected):
    """Stop strings, stop tokens and EOS may all lie in one accepted path; the first one counts."""
    frequent = Counter(token for o in expected for token in set(o.outputs[0].token_ids[5:60]))
    params = SamplingParams(
        temperature=0.0,
        max_tokens=120,
        min_tokens=12,
        stop=["return", ":\n", "self", ")"],
        stop_token_ids=[token for token, _ in frequent.most_common(30)[24:]],
        include_stop_str_in_output=True,
    )
    plain = generate(engine(), prompts(24), params)
    reasons = Counter(type(o.outputs[0].stop_reason) for o in plain)
    assert reasons[str] > 2
    assert reasons[int] > 2
    free = SamplingParams(**{**GREEDY, "max_tokens": 120})
    tell_oracle(generate(engine(), prompts(24), free))  # paths lead past the stops
    check_same_outputs(engine(**TREES), plain, params)


def test_prompts_of_embeddings_beside_tokens(engine, expected):
    """Requests whose prompt has no tokens are decoded without drafts, the others with them."""
    table = load_file(model_path() / "model.safetensors")["model.embed_tokens.weight"].float()
    mixed = [
        prompt if index % 2 else {"prompt_embeds": table[prompt["prompt_token_ids"]]}
        for index, prompt in enumerate(prompts(COUNT))
    ]
    llm = engine(**TREES, enable_prompt_embeds=True)
    tell_oracle(expected)
    before = accepted_tokens(llm)
    assert differences(expected, generate(llm, mixed, SamplingParams(**GREEDY))) == []
    assert accepted_tokens(llm) - before > 0.2 * COUNT / 2 * GREEDY["max_tokens"]
