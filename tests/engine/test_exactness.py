"""Greedy float32 output with trees is that of plain vLLM, token for token."""

from itertools import pairwise

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.beam.cases import few_cases, greedy_requests, run_mixed
from tests.engine.compare import (
    accepted_tokens,
    check_outputs_beside_aborts,
    check_same_outputs,
    differences,
    generate,
    plain_outputs,
    preemptions,
    session_answers,
    session_texts,
    speculation,
)
from tests.engine.prompts import prompts
from vllm_trie.lab.local_engine import scheduler_of, verifier_of
from vllm_trie.lab.tiny_model import model_path

pytestmark = pytest.mark.usefixtures("test_drafters")
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, detokenize=False)
COUNT = None  # all


@pytest.mark.parametrize(
    ("method", "num_nodes", "batch_size"),
    [
        ("ngram_trie", 8, 1),
        ("ngram_trie", 150, 8),
        ("test_oracle", 8, 8),
        ("test_oracle", 150, 1),
    ],
)
def test_greedy(engine, expected, method, num_nodes, batch_size):
    llm = engine(**speculation(method, num_nodes))
    count = 24 if batch_size > 1 else 5
    assert check_same_outputs(llm, expected[:count], GREEDY, batch_size) > 0.2


@pytest.mark.parametrize("off", [False, 0])  # 0 is what vLLM makes of JSON's false
def test_opted_out_request_gets_no_drafts_and_is_not_learned_from(
    engine, expected, monkeypatch, off
):
    llm = engine(**speculation("test_oracle", 32))
    quiet = GREEDY.clone()
    quiet.extra_args = {"speculation": off}
    before, drafter, sizes = accepted_tokens(llm), verifier_of(llm).guard.drafter, []
    monkeypatch.setattr(drafter, "released", lambda request, output: sizes.append(len(output)))
    generate(llm, prompts(4), quiet, 1)  # the next one's first step tells of an end
    assert accepted_tokens(llm) == before
    assert sizes[-3:] == [0] * 3


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_drafts_give_way_to_streams(engine, expected, monkeypatch, kind):
    """Every eighth step can start a request; only if it is a stream the others have no drafts."""
    llm = engine(**speculation("test_oracle", 8))
    core, scheduler = llm.llm_engine, scheduler_of(llm)
    params = GREEDY.clone()
    params.output_kind = kind
    schedule, beside_starts, outputs = scheduler.schedule, [], {}

    def noted(*args, **kwargs):
        step = schedule(*args, **kwargs)
        if step.scheduled_new_reqs:
            beside_starts.append(sum(map(len, step.scheduled_spec_decode_tokens.values())))
        return step

    monkeypatch.setattr(scheduler, "schedule", noted)
    for step in range(8 * 12):
        if step % 8 == 0:
            core.add_request(str(step // 8), prompts()[step // 8], params)
        outputs |= {int(o.request_id): o for o in core.step() if o.finished}
    while core.has_unfinished_requests():
        outputs |= {int(o.request_id): o for o in core.step() if o.finished}
    assert differences(expected[:12], [outputs[i] for i in range(12)]) == []
    assert len(beside_starts) == 12
    assert (max(beside_starts) == 0) == (kind is RequestOutputKind.CUMULATIVE)


def test_no_answer_waits_for_a_drafter(engine, expected, monkeypatch):
    """The scheduler has a step's tokens before they are drafted for."""
    llm = engine(**speculation("test_oracle", 8))
    guard, scheduler, calls = verifier_of(llm).guard, scheduler_of(llm), []

    def noted(name, method):
        def call(*args):
            calls.append(name)
            return method(*args)

        return call

    monkeypatch.setattr(guard, "propose", noted("draft", guard.propose))
    take_in = noted("tokens", scheduler.update_from_output)
    monkeypatch.setattr(scheduler, "update_from_output", take_in)
    assert check_same_outputs(llm, expected[:2], GREEDY, 2) > 0.2
    assert calls[:4] == ["tokens", "draft"] * 2
    assert ("draft", "draft") not in pairwise(calls)


@pytest.mark.parametrize("waits", [False, True])
def test_streaming_input(engine, expected, waits):
    """Prompts that come in parts, each answered until a stop token or a limit, next to others."""
    stops = [o.outputs[0].token_ids[9 + i] for i, o in enumerate(expected[:6])]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=stops)
    places = [slice(0, 40), slice(40, 42), slice(42, 43), slice(43, 60)]
    sessions = [[p["prompt_token_ids"][place] for place in places] for p in prompts(6)]
    others = prompts(3), GREEDY
    plain, ended = session_answers(engine(), sessions, params, waits, others)
    assert [len(answers) for answers in plain] == [4] * 6
    assert differences(expected[:3], ended) == []
    # For drafts that go on behind a stop token.
    plain_outputs(engine(), session_texts(sessions, plain), GREEDY)
    llm = engine(**speculation("test_oracle", 32))
    before = accepted_tokens(llm)
    answers, ended = session_answers(llm, sessions, params, waits, others)
    assert answers == plain
    assert differences(expected[:3], ended) == []
    assert accepted_tokens(llm) > before + 100


def test_little_room(engine, expected):
    """Prompts in parts, preemptions, and requests without drafts beside others."""
    # Blocks for about three of the requests at their full length.
    llm = engine(
        **speculation("test_oracle", 32),
        max_num_batched_tokens=48,
        num_gpu_blocks_override=50,
        block_size=32,
        enable_prefix_caching=False,
    )
    assert max(len(p["prompt_token_ids"]) for p in prompts()) > 3 * 48
    params = [GREEDY.clone() for _ in prompts()]
    for quiet in params[::3]:
        quiet.extra_args = {"speculation": False}
    with preemptions(llm) as preempted:
        assert check_same_outputs(llm, expected, params) > 0.1
    assert preempted


def test_prefix_cache_hits_on_blocks_that_trees_wrote(engine, expected):
    llm = engine(**speculation("test_oracle", 32), block_size=32, enable_prefix_caching=True)
    scheduler_of(llm).reset_prefix_cache()
    some = expected[:12]
    generate(llm, prompts(12), GREEDY)
    # Each prompt again with most of its output: its KV comes from blocks that tree steps filled.
    longer = [
        {"prompt_token_ids": [*o.prompt_token_ids, *o.outputs[0].token_ids[:73]]} for o in some
    ]
    short = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True, detokenize=False)
    outputs = generate(llm, longer, short)
    for before, after in zip(some, outputs, strict=True):
        assert after.num_cached_tokens > len(before.prompt_token_ids) + 40
        assert list(after.outputs[0].token_ids) == list(before.outputs[0].token_ids[73:])


def test_up_to_the_length_limit(engine):
    """Outputs that end at max_model_len, alone and next to requests that are far from it."""
    plain = engine(max_model_len=160)
    tree = engine(**speculation("test_oracle", 64), max_model_len=160)
    some = [{"prompt_token_ids": p["prompt_token_ids"][:140]} for p in prompts()]
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
    expected = plain_outputs(plain, some, endless)
    outputs = generate(tree, some, endless)
    assert differences(expected, outputs) == []
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}
    assert all(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) == 160 for o in outputs)


def test_natural_end(engine, monkeypatch):
    """Requests that end at EOS inside an accepted path; nobody drafts after it."""
    params = SamplingParams(temperature=0.0, max_tokens=300)
    expected = plain_outputs(engine(), prompts(12), params)
    llm = engine(**speculation("test_oracle", 32))
    drafter, drafted_after = verifier_of(llm).guard.drafter, set()

    def propose(requests):
        drafted_after.update(request.token_ids[-1] for request in requests)
        return type(drafter).propose(drafter, requests)

    monkeypatch.setattr(drafter, "propose", propose)
    outputs = generate(llm, prompts(12), params)
    assert differences(expected, outputs) == []
    ended = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    ends = {output.token_ids[-1] for output in ended}
    assert ends
    assert ends.isdisjoint(drafted_after)


def test_compiled_mode(engine, expected):
    """vLLM's default: compiled, with its own thresholds for what is piecewise."""
    options = {"enforce_eager": False, "max_model_len": 512, "block_size": 32}
    tree = engine(**speculation("test_oracle", 32), **options)
    some = [output for output in expected if len(output.prompt_token_ids) <= 300][:12]
    assert check_same_outputs(tree, some, GREEDY) > 0.2
    # Compiling takes most of the time, so beam search comes here too.
    assert run_mixed(tree, str(model_path()), few_cases(), greedy_requests(6)) > 20


def test_abort_midway(engine, expected, monkeypatch):
    llm = engine(**speculation("test_oracle", 32))
    drafter, released = verifier_of(llm).guard.drafter, []
    monkeypatch.setattr(drafter, "released", lambda r, output: released.append(r.request_id))
    aborts = {3: range(1, 12, 4), 6: range(3, 12, 4)}
    check_outputs_beside_aborts(llm, expected[:12], GREEDY, aborts)
    assert not [r for r in verifier_of(llm)._stored_trees if r.startswith("abort-")]
    assert len([r for r in released if r.startswith("abort-")]) == 12


def test_same_request_id_again_after_an_abort(engine, expected):
    llm = engine(**speculation("test_oracle", 32))
    core = llm.llm_engine
    core.add_request("twice", prompts()[0], GREEDY)
    for _ in range(5):
        core.step()
    core.abort_request(["twice"])
    core.add_request("twice", prompts()[1], GREEDY)
    outputs = []
    while core.has_unfinished_requests():
        outputs += [o for o in core.step() if o.finished]
    assert differences([expected[1]], outputs) == []
