"""Bias, allowed tokens and grammars in searches, against ``transformers``."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.engine.beam.cases import greedy_requests, prompt
from tests.engine.beam.oracle import constrained_search
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

SHIPPED = str(model_path())
EOS = 0
OPTIONS = {"block_size": 32, "max_model_len": 256, "max_num_seqs": 64}

ALLOWED = [*range(30, 700, 3), EOS]
BIAS = {5: 4.0, 9: -3.0, 211: 6.5, EOS: 5.0, 13: -100.0}
REGEX = "[a-z ]{1,6}(one|two)?[0-9]{0,3}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHOICE = ["return", "raise", "yield value", "pass"]
GRAMMAR = 'root ::= ("if " | "while ") [a-z]+ ":"'

RULES: list[dict[str, Any]] = [
    {"allowed_token_ids": ALLOWED, "width": 9},
    {"logit_bias": BIAS, "width": 4},
    {"logit_bias": BIAS, "width": 5, "repetition_penalty": 1.3},
    {"structured_outputs": {"regex": REGEX}, "width": 9},
    {"structured_outputs": {"json": SCHEMA}, "width": 4, "max_tokens": 24},
    {"structured_outputs": {"choice": CHOICE}, "width": 12},
    {"structured_outputs": {"grammar": GRAMMAR}, "width": 5},
    {"structured_outputs": {"regex": REGEX}, "allowed_token_ids": ALLOWED, "logit_bias": BIAS,
     "repetition_penalty": 1.2, "width": 6},
]  # fmt: skip


def grammars(backend: str = "xgrammar") -> Any:
    """A compiler of vLLM's matchers."""
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_outlines import OutlinesBackend
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    made = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
    outputs = SimpleNamespace(disable_any_whitespace=False, disable_additional_properties=False)
    config = SimpleNamespace(
        structured_outputs_config=outputs, model_config=None, speculative_config=None
    )
    return made[backend](config, tokenizer=AutoTokenizer.from_pretrained(SHIPPED), vocab_size=2048)


class Valid:
    """Tokens that may follow, each time from a new matcher that takes them from the start."""

    def __init__(self, backend: str, structured: dict[str, Any]) -> None:
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.structured_output.request import get_structured_output_key
        from vllm.v1.structured_output.utils import choice_as_grammar

        if "choice" in structured and backend == "xgrammar":
            structured = {"grammar": choice_as_grammar(structured["choice"])}
        self._key = get_structured_output_key(StructuredOutputsParams(**structured))
        self._backend = grammars(backend)
        self.after = functools.cache(self._after)

    def matcher(self) -> Any:
        return self._backend.compile_grammar(*self._key, {EOS})

    def bits(self, token_ids: tuple[int, ...]) -> np.ndarray:
        matcher = self.matcher()
        assert not token_ids or matcher.accept_tokens("", list(token_ids))
        mask = self._backend.allocate_token_bitmask(1)
        matcher.fill_bitmask(mask, 0)
        return mask[0].numpy()

    def _after(self, token_ids: tuple[int, ...]) -> list[int]:
        bits = np.unpackbits(self.bits(token_ids).view(np.uint8), bitorder="little")[:2048]
        return np.flatnonzero(bits).tolist()


def request_of(number: int, rules: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = {"max_tokens": 12, **rules}
    width = options.pop("width")
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    params = SamplingParams(n=width, temperature=0.0, extra_args={"beam_width": width}, **options)
    return {"prompt_token_ids": list(prompt(number, 20 + 5 * number))}, params


@functools.cache
def expected(number: int) -> list[Any]:
    rules = RULES[number]
    valid = None
    if "structured_outputs" in rules:
        valid = Valid("xgrammar", rules["structured_outputs"])
    some = set(rules.get("allowed_token_ids", range(2048)))

    def allowed(path: tuple[int, ...]) -> list[int]:
        if EOS in path:  # a hypothesis that has ended
            return [EOS]
        return sorted(some if valid is None else some.intersection(valid.after(path)))

    options: dict[str, Any] = {}
    if "logit_bias" in rules:
        bias = rules["logit_bias"]
        options["sequence_bias"] = [[[token], value] for token, value in bias.items()]
    if "repetition_penalty" in rules:
        options["repetition_penalty"] = rules["repetition_penalty"]
    request, params = request_of(number, rules)
    return constrained_search(
        SHIPPED,
        request["prompt_token_ids"],
        rules["width"],
        params.max_tokens,
        allowed,
        EOS,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="at once"),
        pytest.param({"num_gpu_blocks_override": 14}, id="preemption"),
        pytest.param({"max_num_batched_tokens": 64, "async_scheduling": True}, id="asynchronous"),
    ],
)
def test_equals_transformers_in_a_batch(engine, options):
    """Next to ordinary requests, with and without a grammar, that keep their outputs."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = engine(**OPTIONS, **options)
    others = greedy_requests(6, max_tokens=60)
    structured = StructuredOutputsParams(regex=REGEX)
    others.append((others[0][0], SamplingParams(temperature=0, structured_outputs=structured)))
    alone = [llm.generate([text], params, use_tqdm=False)[0] for text, params in others]
    requests = [request_of(number, rules) for number, rules in enumerate(RULES)] + others
    results = llm.generate(
        [text for text, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    for number, result in enumerate(results[: len(RULES)]):
        hypotheses = expected(number)
        tokens = [list(output.token_ids) for output in result.outputs]
        assert tokens[: len(hypotheses)] == [hypothesis.token_ids for hypothesis in hypotheses], (
            RULES[number]
        )
        assert not any(tokens[len(hypotheses) :])
        for output, hypothesis in zip(result.outputs, hypotheses, strict=False):
            assert abs(output.score - hypothesis.score) < 1e-4, RULES[number]
    for result, before in zip(results[len(RULES) :], alone, strict=True):
        assert result.outputs[0].token_ids == before.outputs[0].token_ids
    if "num_gpu_blocks_override" in options:
        assert scheduler_of(llm).beam_counters.beams_preempted


def test_raw_log_probabilities(engine):
    """As in vLLM, the bias is not in them; the score has it."""
    llm = engine(**OPTIONS)
    text, params = request_of(1, RULES[1])
    params.logprobs = 3
    (result,) = llm.generate([text], params, use_tqdm=False)
    assert [list(output.token_ids) for output in result.outputs] == [
        hypothesis.token_ids for hypothesis in expected(1)
    ]
    for output in result.outputs:
        logprobs = [
            step[token].logprob
            for token, step in zip(output.token_ids, output.logprobs, strict=True)
        ]
        assert all(value <= 0 for value in logprobs)
        total = sum(logprobs) + sum(BIAS.get(token, 0) for token in output.token_ids)
        assert output.score == pytest.approx(total / len(logprobs), abs=1e-4)


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"num_beam_groups": 4, "diversity_penalty": 2.0}]
)
def test_sampled_and_diverse_searches(engine, options):
    llm = engine(**OPTIONS)
    text, params = request_of(3, RULES[3] | {"width": 8, "max_tokens": 20})
    params.temperature, params.seed = 1.2, 3
    params.extra_args |= options
    (result,) = llm.generate([text], params, use_tqdm=False)
    assert len(result.outputs) == 8
    for output in result.outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch(REGEX, output.text)


def test_llm_beam_search(engine):
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    llm = engine(**OPTIONS)
    before = scheduler_of(llm).beam_counters.groups
    structured = StructuredOutputsParams(choice=CHOICE)
    params = BeamSearchParams(beam_width=3, max_tokens=20, structured_outputs=structured)
    source = {"prompt_token_ids": list(prompt(7, 40))}
    (result,) = llm.beam_search([source], params)
    assert scheduler_of(llm).beam_counters.groups == before + 1
    for sequence in result.sequences:
        text = llm.get_tokenizer().decode(sequence.tokens[40:], skip_special_tokens=True)
        assert text in CHOICE


@pytest.mark.parametrize("when", ["compiled", "used"])
def test_a_failing_grammar_fails_its_request_only(engine, monkeypatch, when):
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken grammar")

    llm = engine(**OPTIONS)
    broken, whole = request_of(3, RULES[3]), request_of(0, RULES[0])
    with monkeypatch.context() as patched:
        if when == "compiled":
            patched.setattr(XgrammarBackend, "compile_grammar", fail)
        else:
            patched.setattr(XgrammarGrammar, "accept_tokens", fail)
        first, second = llm.generate([broken[0], whole[0]], [broken[1], whole[1]], use_tqdm=False)
    assert {output.finish_reason for output in first.outputs} == {"error"}
    assert [list(output.token_ids) for output in second.outputs] == [
        hypothesis.token_ids for hypothesis in expected(0)
    ]
    (again,) = llm.generate([broken[0]], broken[1], use_tqdm=False)
    assert [list(output.token_ids) for output in again.outputs] == [
        hypothesis.token_ids for hypothesis in expected(3)
    ]


def test_what_is_refused(engine, monkeypatch):
    llm = engine(**OPTIONS)
    config = llm.llm_engine.vllm_config
    text, params = request_of(3, RULES[3] | {"ignore_eos": True})
    with pytest.raises(ValueError, match="structured_outputs is not supported with ignore_eos"):
        llm.generate([text], params, use_tqdm=False)
    params.ignore_eos = False
    monkeypatch.setattr(config.structured_outputs_config, "reasoning_parser", "deepseek_r1")
    with pytest.raises(ValueError, match="with reasoning_parser='deepseek_r1'"):
        llm.generate([text], params, use_tqdm=False)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_one_matcher_walks_all_hypotheses(backend):
    """Its masks are those of a new matcher for each hypothesis, in any order."""
    from vllm_trie.searches.engine.scheduler.group_rules import GrammarMasks

    valid = Valid(backend, {"regex": "[a-z ]{2,40}(one|two)[0-9]*"})
    masks = GrammarMasks(valid.matcher(), valid._backend.allocate_token_bitmask(8))
    random = np.random.default_rng(4)
    rows: list[list[int]] = [[]]
    for _ in range(10):
        bits = masks.of(rows)
        assert np.array_equal(bits, np.stack([valid.bits(tuple(row)) for row in rows]))
        parents = random.integers(len(rows), size=8)
        following = [set(valid.after(tuple(rows[i]))) - {EOS} for i in parents]
        rows = [[*rows[i], int(random.choice(sorted(tokens)))]
                for i, tokens in zip(parents, following, strict=True)]  # fmt: skip
    invalid = min(set(range(1, 2048)) - set(valid.after(())))
    with pytest.raises(RuntimeError, match="the grammar refuses the tokens"):
        masks.of([[invalid]])
