"""Drafts under grammars that take much time, with xgrammar and without an engine."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from vllm_trie.drafts.engine.scheduler import grammar_time
from vllm_trie.drafts.engine.scheduler.grammar_time import TimedGrammar

VOCABULARY = ["a", "b", "c", "<end>"]
DRAFT = [0] * 32


@pytest.fixture
def request_with():
    """Make a request with a regular expression, as the scheduler holds it."""
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[3])
    compiler = xgrammar.GrammarCompiler(info)

    def make(regex: str) -> Any:
        grammar = compiler.compile_regex(regex)
        matcher = xgrammar.GrammarMatcher(grammar)
        timed = TimedGrammar(XgrammarGrammar(len(VOCABULARY), matcher, grammar))
        return SimpleNamespace(
            use_structured_output=True, structured_output_request=SimpleNamespace(grammar=timed)
        )

    return make


def checked(request: Any, draft: list[int]) -> list[int]:
    manager: Any = SimpleNamespace(_get_constraint_bounds=lambda *_: (0, 0))
    original = StructuredOutputManager.validate_tokens
    original = getattr(original, "__wrapped__", original)  # another test may have installed it
    return grammar_time.validate_tokens(original, manager, request, draft)


def test_a_grammar_that_costs_little_checks_whole_drafts(request_with, monkeypatch):
    monkeypatch.setattr(grammar_time, "REQUEST_SECONDS", 1.0)
    request = request_with("a*b")
    assert checked(request, DRAFT) == DRAFT
    assert checked(request, [0, 0, 0, 0, 0, 2, 0]) == [0] * 5
    assert checked(request, [0, -1, -1]) == [0]
    assert checked(request, [2]) == []
    assert checked(request, []) == []


def test_drafts_shrink_with_the_cost_of_their_grammar(request_with):
    """Drafts are taken whole. No step costs many times the limit, and plain steps come back."""
    request = request_with("(a*)*b")
    grammar = request.structured_output_request.grammar
    lengths, seconds, length = [], [], 0
    while length < 200:
        start = time.thread_time()
        draft = checked(request, DRAFT)
        seconds.append(time.thread_time() - start)
        assert grammar.accept_tokens("", [*draft, 0])
        lengths.append(len(draft))
        length += len(draft) + 1
    assert max(lengths[:3]) > 0
    assert lengths[-20:] == [0] * 20
    assert max(seconds) < 10 * grammar_time.REQUEST_SECONDS


@pytest.mark.parametrize(
    ("executor", "world_size", "is_timed"),
    [("external_launcher", 2, False), ("external_launcher", 1, True), ("mp", 2, True)],
)
def test_schedulers_of_ranks_shorten_drafts_alike(monkeypatch, executor, world_size, is_timed):
    """An external launcher starts one on each rank, whose clocks differ."""
    monkeypatch.setattr(grammar_time.config, "read", lambda vllm_config: object())
    parallel = SimpleNamespace(distributed_executor_backend=executor, world_size=world_size)
    manager: Any = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    grammar: Any = object()
    made = grammar_time.create_grammar(lambda *_: grammar, manager, SimpleNamespace())
    assert isinstance(made, TimedGrammar) == is_timed
    assert is_timed or made is grammar


def test_what_costs_much_shortens_drafts(request_with, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "thread_time", lambda: clock.now)

    def slow(name: str, seconds: float) -> Any:
        """Return a request, and its grammar, a method of which takes so long."""
        request = request_with("a*b")
        grammar = request.structured_output_request.grammar
        method = getattr(grammar._grammar, name)

        def call(*arguments: Any) -> Any:
            clock.now += seconds
            return method(*arguments)

        monkeypatch.setattr(grammar._grammar, name, call)
        return request, grammar

    request, grammar = slow("fill_bitmask", 0.01)
    grammar.fill_bitmask(torch.zeros(1, 1, dtype=torch.int32), 0)
    assert checked(request, DRAFT) == []
    assert grammar.validate_tokens(DRAFT) == DRAFT  # what the grammar allows stays the same
    request, grammar = slow("validate_tokens", 0.01)
    assert checked(request, DRAFT[:3]) == []  # its first check shows it
    request, grammar = slow("validate_tokens", 0.0016)
    assert checked(request, [2, *DRAFT]) == []
    assert grammar.num_affordable == 0  # the token that was refused took all that time
