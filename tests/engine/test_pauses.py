"""Steps without drafts take the path of an engine without speculation, and nothing is lost."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig

from tests.engine.compare import accepted_tokens, differences, generate, plain_outputs, speculation
from tests.engine.prompts import prompts
from vllm_trie.drafts.budget import NodeBudget
from vllm_trie.lab.local_engine import runner_of, verifier_of
from vllm_trie.lab.tiny_model import medusa_path

pytestmark = pytest.mark.usefixtures("test_drafters")

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
METHODS = {"test_oracle": {}, "lookahead_trie": {}, "medusa_dynamic": {"model": str(medusa_path())}}


@pytest.fixture
def pauses(monkeypatch):
    """Drafting is wanted after some steps and not after others, and every node is verified."""
    answers = itertools.cycle([True] * 3 + [False] * 4 + [True] + [False])
    monkeypatch.setattr(NodeBudget, "should_draft", lambda self, num_rows: next(answers))
    monkeypatch.setattr(NodeBudget, "cut", lambda self, trees, num_rows: list(trees))


def count_calls(monkeypatch, runner, *names: str) -> Counter[str]:
    """How often methods of the runner are called from now on."""
    calls: Counter[str] = Counter()

    def counted(name, method):
        def call(*args, **kwargs):
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(runner, name, counted(name, getattr(runner, name)))
    return calls


def test_pausing_steps_do_nothing_for_drafts(engine, pauses, monkeypatch):
    expected = plain_outputs(engine(), prompts(4), GREEDY)
    llm = engine(**speculation("test_oracle", 16, node_budget="adaptive"))
    runner = runner_of(llm)
    calls = count_calls(
        monkeypatch,
        runner,
        "_prepare_inputs",
        "_calc_spec_decode_metadata",
        "propose_draft_token_ids",
    )
    verifier, timed = verifier_of(llm), Counter[int]()
    monkeypatch.setattr(verifier.budget, "observe_step", lambda size, _: timed.update([size]))
    totals, started = verifier.totals, time.perf_counter()
    before = totals.steps, totals.tokens
    assert differences(expected, generate(llm, prompts(4), GREEDY, 1)) == []
    assert timed[1] > 0 < timed.total() - timed[1], "steps without drafts, and with them"
    assert verifier.clock._ended > started
    assert 0 < calls["_calc_spec_decode_metadata"] <= calls["propose_draft_token_ids"]
    # Four of nine steps draft.
    assert calls["propose_draft_token_ids"] / calls["_prepare_inputs"] == pytest.approx(
        4 / 9, abs=0.1
    )
    assert totals.steps - before[0] == calls["_prepare_inputs"]
    assert totals.tokens - before[1] == sum(len(o.outputs[0].token_ids) for o in expected)
    assert runner.speculative_config is not None


@pytest.mark.parametrize("method", METHODS)
def test_greedy(engine, pauses, method):
    options = {} if method == "lookahead_trie" else {"max_num_batched_tokens": 48}
    expected = plain_outputs(engine(**options), prompts(8), GREEDY)
    tree = engine(**speculation(method, 24, node_budget="adaptive", **METHODS[method]), **options)
    totals = verifier_of(tree).totals
    before = totals.tokens - totals.steps
    assert differences(expected, generate(tree, prompts(8), GREEDY, 5)) == []
    assert totals.tokens - totals.steps > before + 12  # drafts were accepted in between


def test_sampling_parameters(engine, pauses):
    kinds = (
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logprobs": 3},
    )
    params = [SamplingParams(max_tokens=48, ignore_eos=True, **kinds[i % 3]) for i in range(10)]
    expected = plain_outputs(engine(), prompts(10), params)
    tree = engine(**speculation("test_oracle", 24, node_budget="adaptive"))
    assert differences(expected, generate(tree, prompts(10), params)) == []


def test_thinking_budgets_beside_other_requests(engine, pauses):
    """Each ends the thinking of its own request alone, at every index of the batch."""
    # The model writes many parentheses, so that most answers think several times.
    strings = {"reasoning_start_str": "(", "reasoning_end_str": " None"}
    thinking = {"reasoning_config": ReasoningConfig(**strings)}
    brief = GREEDY.clone()
    brief.thinking_token_budget = 3
    plain = engine(**thinking)
    shortened = generate(plain, prompts(6), brief, 1)
    expected = plain_outputs(plain, prompts(6), GREEDY)
    assert len(differences(expected, shortened)) > 3
    for verification in "tree", "chain":
        drafting = speculation("test_oracle", 24, node_budget="adaptive", verification=verification)
        llm = engine(**drafting, **thinking)
        before = accepted_tokens(llm)
        for limited in range(0, 6, 2), range(1, 6, 2), range(5, 6):
            params = [brief if index in limited else GREEDY for index in range(6)]
            mixed = [(shortened if index in limited else expected)[index] for index in range(6)]
            assert differences(mixed, generate(llm, prompts(6), params)) == []
        assert accepted_tokens(llm) > before + 12
