"""Forced tokens behind drafts, with the grammars of vLLM's back ends and without an engine."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from vllm_trie.drafts.engine.scheduler import grammar_time
from vllm_trie.drafts.engine.scheduler.grammar_time import TimedGrammar
from vllm_trie.extras.forced_tokens import forced_tokens
from vllm_trie.extras.forced_tokens.forced_tokens import ForcedTokens
from vllm_trie.hooks.wire import SPECULATION
from vllm_trie.lab.tiny_model import model_path

SCHEMA = {
    "type": "object",
    "properties": {"description": {"enum": ["certainly", "never"]}, "count": {"type": "integer"}},
    "required": ["description", "count"],
    "additionalProperties": False,
}
BACKENDS = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
NODES = 16


class Setting:
    """A request with a schema, and the scheduler that it runs in."""

    def __init__(self, backend: str, schema: dict[str, Any] = SCHEMA, **params: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_path())
        config = SimpleNamespace(
            structured_outputs_config=StructuredOutputsConfig(
                backend=backend, disable_any_whitespace=backend != "outlines"
            ),
            speculative_config=SimpleNamespace(num_speculative_tokens=NODES),
            num_speculative_tokens=NODES,
            model_config=None,
        )
        size = len(self.tokenizer)
        self.backend = BACKENDS[backend](config, tokenizer=self.tokenizer, vocab_size=size)
        grammar = self.backend.compile_grammar(StructuredOutputOptions.JSON, json.dumps(schema))
        self.grammar = TimedGrammar(grammar)
        self.request = SimpleNamespace(
            request_id="a",
            prompt_token_ids=[1],
            output_token_ids=[],
            use_structured_output=True,
            sampling_params=SamplingParams(max_tokens=100, **params),
            structured_output_request=SimpleNamespace(grammar=self.grammar, reasoning_ended=None),
            is_prefill_chunk=False,
            spec_token_ids=[],
            max_tokens=100,
            num_output_tokens=1,
            num_tokens=10,
        )
        self.scheduler: Any = SimpleNamespace(
            running=[self.request],
            num_spec_tokens=NODES,
            max_model_len=200,
            structured_output_manager=SimpleNamespace(
                backend=self.backend,
                tokenizer=self.tokenizer,
                reasoner_cls=None,
                enable_in_reasoning=False,
            ),
        )
        self.forced = ForcedTokens(self.scheduler)

    def draft_after(self, text: str, draft: str = "") -> str:
        """Return the draft once it was extended, after a text that the grammar has accepted."""
        self.grammar.reset()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        assert self.grammar.accept_tokens("", tokens)
        self.request.output_token_ids = tokens
        self.request.spec_token_ids = self.tokenizer.encode(draft, add_special_tokens=False)
        self.forced.extend_drafts()
        extended: str = self.tokenizer.decode(self.request.spec_token_ids)
        # The matcher stands where it stood.
        valid = self.tokenizer.encode(extended, add_special_tokens=False)
        assert self.grammar.validate_tokens(valid[:1]) == valid[:1]
        return extended


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    monkeypatch.setattr(forced_tokens, "STEP_SECONDS", 60.0)
    monkeypatch.setattr(grammar_time, "REQUEST_SECONDS", 60.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_and_quotes_are_drafted_to_the_next_choice(backend):
    if backend == "outlines" and importlib.util.find_spec("outlines_core") is None:
        pytest.skip("outlines is not installed")
    setting = Setting(backend)
    assert setting.draft_after('{"').startswith("description")
    assert setting.draft_after('{"description":"n').startswith("ever")
    assert setting.draft_after('{"description":"', draft="n").startswith("never")
    # `certainly` or `never`, and any number: nothing is forced, and the request took neither yet.
    setting.request.request_id = "b"
    assert setting.draft_after('{"description":"') == ""
    assert setting.draft_after('{"description":', draft='"') == '"'
    assert setting.draft_after('{"description":"never","count":1') == ""


@pytest.mark.parametrize("backend", ["xgrammar", "guidance"])
def test_a_choice_is_drafted_as_the_request_took_it_last(backend):
    words = {"type": "array", "items": {"enum": ["certainly", "never"]}}
    setting = Setting(backend, words)
    assert setting.draft_after('["') == ""
    setting.draft_after('["never')
    assert setting.draft_after('["never","') == 'never","'  # two choices
    assert setting.draft_after('["never","certainly","').startswith("certainly")
    setting.request.request_id = "b"
    assert setting.draft_after('["') == ""


def test_a_draft_has_no_more_tokens_than_the_limits_allow():
    setting = Setting("xgrammar")
    setting.request.max_tokens = 4  # one is there, and one is sampled behind the draft
    setting.draft_after('{"')
    assert len(setting.request.spec_token_ids) == 2
    setting.request.max_tokens = 100
    setting.request.num_tokens = 198
    setting.draft_after('{"')
    assert len(setting.request.spec_token_ids) == 1


@pytest.mark.parametrize(
    "why", ["opted out", "budget", "embeddings", "prefill", "thinking", "time", "cost", "compiling"]
)
def test_other_requests_keep_their_drafts(why, monkeypatch):
    params: dict[str, dict[str, Any]] = {
        "opted out": {"extra_args": {SPECULATION: False}},
        "budget": {"thinking_token_budget": 4},
    }
    setting = Setting("xgrammar", **params.get(why, {}))
    if why == "embeddings":
        setting.request.prompt_token_ids = None
    setting.request.is_prefill_chunk = why == "prefill"
    if why == "thinking":
        setting.scheduler.structured_output_manager.reasoner_cls = object
    if why == "time":
        monkeypatch.setattr(forced_tokens, "STEP_SECONDS", 0.0)
    if why == "cost":
        monkeypatch.setattr(grammar_time, "REQUEST_SECONDS", 1e-8)
    if why == "compiling":
        setting.request.structured_output_request.grammar = None
    setting.grammar.accept_tokens("", setting.tokenizer.encode('{"', add_special_tokens=False))
    setting.forced.extend_drafts()
    assert setting.request.spec_token_ids == []


@pytest.mark.parametrize("method", ["fill_bitmask", "accept_tokens"])
def test_an_error_ends_the_extension_of_one_request(method, monkeypatch, plugin_log):
    """Fail behind a draft and forced tokens; the matcher stands where it stood."""
    setting, other = Setting("xgrammar"), Setting("xgrammar")
    other.request.request_id = "b"
    other.grammar.accept_tokens("", other.tokenizer.encode('{"', add_special_tokens=False))
    setting.scheduler.running.append(other.request)
    draft = setting.tokenizer.encode('{"', add_special_tokens=False)
    original, calls = getattr(setting.grammar, method), 0

    def fail(*arguments: object) -> Any:
        nonlocal calls
        calls += 1
        if calls > len(draft) + 1:
            raise RuntimeError("no matcher")
        return original(*arguments)

    monkeypatch.setattr(setting.grammar, method, fail)
    setting.request.spec_token_ids = draft
    for _ in range(2):
        other.request.spec_token_ids = []
        setting.forced.extend_drafts()
        assert setting.request.spec_token_ids == draft
        assert other.request.spec_token_ids, "its grammar is sound"
        failed_calls, calls = calls, len(draft) + 1
    assert failed_calls == len(draft) + 1, "it is not tried again"
    assert plugin_log.text.count("no forced tokens are drafted for request a") == 1
    monkeypatch.undo()
    assert setting.grammar.validate_tokens(draft) == draft
    setting.scheduler.running.remove(setting.request)
    setting.forced.extend_drafts()
    setting.scheduler.running.append(setting.request)
    setting.forced.extend_drafts()
    assert len(setting.request.spec_token_ids) > len(draft), "another one of that id is tried"
