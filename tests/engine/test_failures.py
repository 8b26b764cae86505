"""A drafter that fails costs its request the drafts, never the engine."""

import logging
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine import FinishReason

from tests.engine.compare import accepted_tokens, differences, generate, speculation
from tests.engine.drafters import HiddenStateDrafter
from tests.engine.prompts import prompts
from tests.unit.hooks.frontend import engine_request
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.hooks.wire import CACHE_SALT, SEARCH_KEY, STATS_ATTRIBUTE, TreeStats
from vllm_trie.lab.local_engine import runner_of, scheduler_of, verifier_of

pytestmark = pytest.mark.usefixtures("test_drafters")
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, detokenize=False)
COUNT = 16


def test_a_drafter_that_fails_at_random(engine, expected, plugin_log):
    llm = engine(**speculation("test_faulty", 16))
    before = accepted_tokens(llm)
    with plugin_log.at_level(logging.ERROR):
        outputs = generate(llm, prompts(16), GREEDY)
    assert differences(expected, outputs) == []
    assert accepted_tokens(llm) > before
    failures = verifier_of(llm).guard.failures
    assert failures["error"] > 0
    assert failures["malformed"] > 0
    waiting = getattr(scheduler_of(llm), STATS_ATTRIBUTE, None) or TreeStats()
    counted = {
        metric.labels["reason"]: metric.value
        + waiting.draft_failures.get(metric.labels["reason"], 0)
        for metric in llm.get_metrics()
        if metric.name == "vllm:trie_draft_failures" and metric.labels["method"] == "test_faulty"
    }
    assert counted == failures
    assert verifier_of(llm).totals.draft_failures == {k: n for k, n in failures.items() if n}
    reports = [r for r in plugin_log.records if "drafter 'test_faulty' failed" in r.getMessage()]
    assert len(reports) == 1
    assert reports[0].exc_info is not None


def test_a_drafter_that_takes_too_long(engine, expected):
    llm = engine(**speculation("test_slow", 16, draft_timeout_s=0.2))
    outputs = generate(llm, prompts(16), GREEDY)
    assert differences(expected, outputs) == []
    assert verifier_of(llm).guard.failures["timeout"] == 1
    # It stays off: the next requests do not wait for it.
    assert differences(expected, generate(llm, prompts(16), GREEDY)) == []
    assert verifier_of(llm).guard.failures["timeout"] == 1


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_hidden_states_and_last_steps(engine, expected, verification):
    """A drafter sees the hidden state of the newest token's predecessor, the last accepted node.

    Plain decoding gives the reference: its hidden state after the same tokens.
    """
    options = speculation("test_hidden_states", 16, verification=verification)
    llm = engine(**options, enable_prefix_caching=False)
    HiddenStateDrafter.seen.clear()
    HiddenStateDrafter.steps.clear()
    generate(llm, prompts(6), GREEDY)
    runner = runner_of(llm)
    jumps = 0
    for (tokens, hidden), (_, last) in zip(
        HiddenStateDrafter.seen, HiddenStateDrafter.steps, strict=True
    ):
        # The state from which the newest token was sampled must give that token back.
        logits = runner.model.compute_logits(hidden[None])
        assert int(logits.argmax()) == tokens[-1]
        path = [int(last.tree.token_ids[node]) for node in last.accepted]
        assert list(tokens[len(tokens) - len(path) - 1 : -1]) == path
        after = last.accepted[-1] + 1 if last.accepted else 0
        assert int(last.node_argmax[after]) == tokens[-1]
        assert len(last.node_argmax) == last.tree.num_nodes + 1
        in_a_row = verification == "tree" and list(last.accepted) == list(range(len(path)))
        jumps += bool(path) and not in_a_row
    assert jumps > 20


def test_cache_salts_reach_the_drafter(engine, expected):
    llm = engine(**speculation("test_hidden_states", 16), enable_prefix_caching=False)
    HiddenStateDrafter.salts.clear()
    salted = [{**prompt, "cache_salt": f"tenant {i}"} for i, prompt in enumerate(prompts(2))]
    generate(llm, [*salted, *prompts(3)[2:]], GREEDY)
    assert sorted(HiddenStateDrafter.salts.values(), key=str) == [None, "tenant 0", "tenant 1"]


def test_requests_of_another_front_end(engine):
    """vLLM's in Rust sends what a client writes: any type, and no key of the plugin's."""
    llm = engine(**speculation("test_hidden_states", 16), enable_prefix_caching=False)
    core = llm.llm_engine.engine_core
    HiddenStateDrafter.salts.clear()
    written: dict[str, tuple[str | None, dict[str, Any] | None]] = {
        "salted": ("tenant", None),
        "another's salt": ("tenant", {CACHE_SALT: "other"}),
        "no text": (None, {CACHE_SALT: 5, "prediction": "text", "speculation": "yes"}),
        "search": (None, {"beam_width": 4}),
        "catalogue": (None, {"items": "shop"}),
        "forged": (None, {SEARCH_KEY: 5}),
    }
    kept = []
    for name, (salt, extra_args) in written.items():
        params = SamplingParams(temperature=0.0, max_tokens=3, extra_args=extra_args)
        kept.append((params, extra_args))
        request = engine_request(prompts(1)[0]["prompt_token_ids"][:20], params)
        request.request_id, request.cache_salt = name, salt
        core.add_request(request)
    ends: dict[str, FinishReason] = {}
    while len(ends) < len(written):
        outputs = core.get_output().outputs
        ends |= {o.request_id: o.finish_reason for o in outputs if o.finish_reason is not None}
    failed = [name for name, end in ends.items() if end == FinishReason.ERROR]
    assert sorted(failed) == ["catalogue", "forged", "search"]
    salts = {"salted": "tenant", "another's salt": "tenant", "no text": None}
    assert HiddenStateDrafter.salts == salts
    assert all(params.extra_args == extra_args for params, extra_args in kept), "the client's"
    assert not any(verifier_of(llm).guard.failures.values())


def test_the_hidden_state_test_can_fail(engine, expected, monkeypatch):
    """With the hidden state of the wrong row, the assertion above does not hold."""
    llm = engine(**speculation("test_hidden_states", 16), enable_prefix_caching=False)
    HiddenStateDrafter.seen.clear()
    runner = runner_of(llm)
    stock = TreeStep.last_row
    monkeypatch.setattr(TreeStep, "last_row", lambda step, i: max(0, stock(step, i) - 1))
    generate(llm, prompts(6), GREEDY)
    wrong = sum(
        int(runner.model.compute_logits(hidden[None]).argmax()) != tokens[-1]
        for tokens, hidden in HiddenStateDrafter.seen
    )
    assert wrong > 20
