"""Every sampling parameter does with trees what it does without."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.compare import (
    accepted_tokens,
    chi_square_p_value,
    differences,
    generate,
    plain_outputs,
    speculation,
)
from tests.engine.drafters import AnswerSetDrafter
from tests.engine.prompts import prompts, tokenizer
from vllm_trie.drafts.engine.scheduler import grammar_time
from vllm_trie.lab.local_engine import scheduler_of

pytestmark = pytest.mark.usefixtures("test_drafters")


def _compare(engine, params, count=8, **options):
    """The same requests on both engines: equal outputs, and drafts that were accepted."""
    some = prompts(count)
    expected = plain_outputs(engine(**options), some, params)
    tree = engine(**speculation("test_oracle", 24), **options)
    before = accepted_tokens(tree)
    outputs = generate(tree, some, params)
    assert differences(expected, outputs) == []
    assert accepted_tokens(tree) > before + count
    return expected, outputs


GREEDY = {"temperature": 0.0, "max_tokens": 56}


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["\n\n", "return"], "include_stop_str_in_output": True},
        {"stop_token_ids": "frequent"},
        {"min_tokens": 36, "stop_token_ids": "frequent"},
        {"repetition_penalty": 1.3, "ignore_eos": True},
        {"presence_penalty": 0.8, "frequency_penalty": 0.4, "ignore_eos": True},
        {"bad_words": ["def", "self.", "return", "for i in"], "ignore_eos": True},
        {"allowed_token_ids": list(range(200, 900)), "ignore_eos": True},
        {"logit_bias": {210: 4.0, 260: -100.0, 13: 2.5}, "min_p": 0.2, "ignore_eos": True},
        {"skip_special_tokens": False, "min_tokens": 30},
    ],
    ids=lambda p: "-".join(p),
)
def test_greedy_with(engine, params):
    params = dict(params)
    if params.get("stop_token_ids") == "frequent":
        # Tokens that do occur, but not before there was something to draft.
        plain = generate(engine(), prompts(8), SamplingParams(**GREEDY, ignore_eos=True))
        outputs = [list(o.outputs[0].token_ids) for o in plain]
        early = {token for output in outputs for token in output[:20]}
        late = Counter(t for output in outputs for t in output[20:] if t not in early)
        params["stop_token_ids"] = [token for token, _ in late.most_common(8)]
        params["ignore_eos"] = True
    expected, _ = _compare(engine, SamplingParams(**{**GREEDY, **params}))
    if "stop" in params or "stop_token_ids" in params:
        assert any(o.outputs[0].finish_reason == "stop" for o in expected)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.1, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.0, "min_p": 0.05, "logit_bias": {210: 3.0, 13: -2.0}},
    ],
    ids=lambda p: "-".join(p),
)
def test_seeded(engine, params):
    """A seeded request draws the same random numbers, and so the same tokens, one by one."""
    seeded = [
        SamplingParams(**params, seed=100 + i, max_tokens=56, ignore_eos=True) for i in range(8)
    ]
    _compare(engine, seeded)


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_seeds_next_to_drafts_and_chunks(engine, monkeypatch, verification):
    """Prompts of one step and of several, with and without seeds and drafts.

    Prompts that fit into a step without drafts are computed at once.
    """
    some = [prompts()[i] for i in (24, 25, 26, 27, 28, 29, 6, 0, 16, 1, 18, 22)]
    params = [
        SamplingParams(
            temperature=0.9 if i % 2 else 0.0,
            seed=i if i % 2 else None,
            max_tokens=60,
            ignore_eos=True,
            extra_args={"speculation": i % 3 > 0},
        )
        for i in range(len(some))
    ]
    expected = plain_outputs(engine(), some, params)
    llm = engine(
        **speculation("test_oracle", 48, verification=verification),
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    )
    core, scheduler, outputs, splits = llm.llm_engine, scheduler_of(llm), {}, []
    schedule = scheduler.schedule

    def note_splits(*args, **kwargs):
        step = schedule(*args, **kwargs)
        drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
        for new in step.scheduled_new_reqs:
            length, chunk = len(new.prompt_token_ids), step.num_scheduled_tokens[new.req_id]
            others = step.total_num_scheduled_tokens - chunk - drafts
            if chunk < length:
                splits.append(length > 256 - others)
        return step

    monkeypatch.setattr(scheduler, "schedule", note_splits)
    before = accepted_tokens(llm)
    for step in itertools.count():
        # Six at once, then one after the other.
        arriving = range(6) if not step else [5 + step // 4] if step % 4 == 0 else []
        for i in arriving if step <= 24 else []:
            core.add_request(str(i), some[i], params[i])
        outputs |= {int(o.request_id): o for o in core.step() if o.finished}
        if len(outputs) == len(some):
            break
    assert splits.count(True) >= 4
    assert splits.count(False) == 0
    assert accepted_tokens(llm) > before + 40
    # vLLM's rejection sampler draws other numbers for chains than plain decoding does.
    same = [i for i in range(len(some)) if verification == "tree" or i % 6 in (0, 2, 3, 4)]
    assert differences([expected[i] for i in same], [outputs[i] for i in same]) == []


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["textwrap", "fractions", "calendar"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {
            "type": "array",
            "items": {"enum": ["red", "green"]},
            "minItems": 4,
            "maxItems": 6,
        },
    },
    "required": ["name", "count", "tags"],
    "additionalProperties": False,
}

STRUCTURED = StructuredOutputsParams(json=SCHEMA)
# A model as small as this one would otherwise fill its output with white space.
COMPACT = {
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "logits_processors": ["tests.engine.logits_processors:Apart"],
}


def test_structured_outputs(engine):
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=STRUCTURED)
    _, outputs = _compare(engine, params, **COMPACT)
    complete = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert complete
    for text in complete:
        assert set(json.loads(text)) == {"name", "count", "tags"}


def test_no_drafts_where_a_grammar_takes_too_much_time(engine, monkeypatch):
    params = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=STRUCTURED)
    tree = engine(**speculation("test_oracle", 24), **COMPACT)
    before = accepted_tokens(tree)
    monkeypatch.setattr(grammar_time, "REQUEST_SECONDS", 0.0)
    generate(tree, prompts(2), params)
    assert accepted_tokens(tree) == before


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_custom_logits_processor(engine, temperature):
    """Its rule reads the last output token, its state counts the output."""
    apart = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=60,
            ignore_eos=True,
            min_tokens=30,
            extra_args={"apart": 16} if i % 3 else None,
        )
        for i in range(8)
    ]
    expected, _ = _compare(engine, apart, **COMPACT)
    free = generate(
        engine(**COMPACT),
        prompts(8),
        [SamplingParams(temperature=temperature, seed=i, max_tokens=60) for i in range(8)],
    )
    assert differences(expected, free)


def test_unseeded_distribution(engine):
    """Two tokens sampled through a trie of likely outputs: chi-square against plain sampling."""
    prompt = tokenizer().encode("def main(argv):\n    ")
    batch = [{"prompt_token_ids": prompt}] * 256
    params = SamplingParams(temperature=1.2, top_k=6, max_tokens=3, ignore_eos=True)

    def sample(where):
        outputs = [o for _ in range(8) for o in generate(where, batch, params)]
        return Counter(tuple(o.outputs[0].token_ids) for o in outputs)

    reference = sample(engine(max_num_seqs=256))
    AnswerSetDrafter.outputs = [list(o) for o, _ in reference.most_common(40)]
    for verification in "tree", "chain":
        drafting = speculation("test_answer_set", 12, verification=verification)
        llm = engine(**drafting, max_num_seqs=256)
        before = accepted_tokens(llm)
        drawn = sample(llm)
        assert accepted_tokens(llm) - before > 700
        assert chi_square_p_value(reference, drawn) > 1e-4


def test_a_wrong_sampler_fails_the_distribution_test():
    """The test above would notice a drafter's guess that is taken too often."""
    right = Counter({0: 1000, 1: 600, 2: 400})
    biased = Counter({0: 1150, 1: 520, 2: 330})
    assert chi_square_p_value(right, biased) < 1e-4
    assert chi_square_p_value(right, Counter({0: 1010, 1: 590, 2: 400})) > 0.5
