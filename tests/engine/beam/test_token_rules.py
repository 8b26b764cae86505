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
from tests.engine.conftest import scheduler_of
from vllm_trie.tiny_model import model_path

SHIPPED = str(model_path())
EOS = 0
OPTIONS = {"block_size": 32, "max_model_len": 256, "max_num_seqs": 64}

ALLOWED = [*range(30, 700, 3), EOS]
BIAS = {5: 4.0, 9: -3.0, 211: 6.5, EOS: 5.0, 13: -100.0}
REGEX = "[a-z ]{1,6}(one|two)?[0-9]{0,3}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHOICE = ["return", "raise", "yield value", "pass"]
GRAMMAR = 'root ::= ("if " | "while ") [a-z]+ ":"'

WANTED: list[dict[str, Any]] = [
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


def request_of(number: int, wanted: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    options = {"max_tokens": 12, **wanted}
    width = options.pop("width")
    if "structured_outputs" in options:
        options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
    params = SamplingParams(n=width, temperature=0.0, extra_args={"beam_width": width}, **options)
    return {"prompt_token_ids": list(prompt(number, 20 + 5 * number))}, params


@functools.cache
def expected(number: int) -> list[Any]:
    wanted = WANTED[number]
    valid = None
    if "structured_outputs" in wanted:
        valid = Valid("xgrammar", wanted["structured_outputs"])
    some = set(wanted.get("allowed_token_ids", range(2048)))

    def allowed(path: tuple[int, ...]) -> list[int]:
        if EOS in path:  # a hypothesis that has ended
            return [EOS]
        return sorted(some if valid is None else some.intersection(valid.after(path)))

    options: dict[str, Any] = {}
    if "logit_bias" in wanted:
        bias = wanted["logit_bias"]
        options["sequence_bias"] = [[[token], value] for token, value in bias.items()]
    if "repetition_penalty" in wanted:
        options["repetition_penalty"] = wanted["repetition_penalty"]
    request, params = request_of(number, wanted)
    return constrained_search(
        SHIPPED,
        request["prompt_token_ids"],
        wanted["width"],
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
    requests = [request_of(number, wanted) for number, wanted in enumerate(WANTED)] + others
    results = llm.generate(
        [each[0] for each in requests], [each[1] for each in requests], use_tqdm=False
    )
    for number, result in enumerate(results[: len(WANTED)]):
        hypotheses = expected(number)
        found = [list(each.token_ids) for each in result.outputs]
        assert found[: len(hypotheses)] == [each.token_ids for each in hypotheses], WANTED[number]
        assert not any(found[len(hypotheses) :])
        for output, each in zip(result.outputs, hypotheses, strict=False):
            assert abs(output.score - each.score) < 1e-4, WANTED[number]
    for result, before in zip(results[len(WANTED) :], alone, strict=True):
        assert result.outputs[0].token_ids == before.outputs[0].token_ids
    if "num_gpu_blocks_override" in options:
        assert scheduler_of(llm).beam_counters.beams_preempted


def test_raw_log_probabilities(engine):
    """As in vLLM, the bias is not in them; the score has it."""
    llm = engine(**OPTIONS)
    text, params = request_of(1, WANTED[1])
    params.logprobs = 3
    (result,) = llm.generate([text], params, use_tqdm=False)
    assert [list(each.token_ids) for each in result.outputs] == [
        each.token_ids for each in expected(1)
    ]
    for output in result.outputs:
        own = [
            step[token].logprob
            for token, step in zip(output.token_ids, output.logprobs, strict=True)
        ]
        assert all(value <= 0 for value in own)
        total = sum(own) + sum(BIAS.get(token, 0) for token in output.token_ids)
        assert output.score == pytest.approx(total / len(own), abs=1e-4)


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"num_beam_groups": 4, "diversity_penalty": 2.0}]
)
def test_sampled_and_diverse_searches(engine, options):
    llm = engine(**OPTIONS)
    text, params = request_of(3, WANTED[3] | {"width": 8, "max_tokens": 20})
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
    broken, whole = request_of(3, WANTED[3]), request_of(0, WANTED[0])
    with monkeypatch.context() as patched:
        if when == "compiled":
            patched.setattr(XgrammarBackend, "compile_grammar", fail)
        else:
            patched.setattr(XgrammarGrammar, "accept_tokens", fail)
        first, second = llm.generate([broken[0], whole[0]], [broken[1], whole[1]], use_tqdm=False)
    assert {each.finish_reason for each in first.outputs} == {"error"}
    assert [list(each.token_ids) for each in second.outputs] == [
        each.token_ids for each in expected(0)
    ]
    (again,) = llm.generate([broken[0]], broken[1], use_tqdm=False)
    assert [list(each.token_ids) for each in again.outputs] == [
        each.token_ids for each in expected(3)
    ]


def test_what_is_refused(engine, monkeypatch):
    llm = engine(**OPTIONS)
    config = llm.llm_engine.vllm_config
    text, params = request_of(3, WANTED[3] | {"ignore_eos": True})
    with pytest.raises(ValueError, match="structured_outputs is not supported with ignore_eos"):
        llm.generate([text], params, use_tqdm=False)
    params.ignore_eos = False
    monkeypatch.setattr(config.structured_outputs_config, "reasoning_parser", "deepseek_r1")
    with pytest.raises(ValueError, match="with reasoning_parser='deepseek_r1'"):
        llm.generate([text], params, use_tqdm=False)


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_one_matcher_walks_all_hypotheses(backend):
    """Its masks are those of a new matcher for each hypothesis, in any order."""
    from vllm_trie.vllm_hooks.scheduler.group_rules import GrammarMasks

    valid = Valid(backend, {"regex": "[a-z ]{2,40}(one|two)[0-9]*"})
    masks = GrammarMasks(valid.matcher(), valid._backend.allocate_token_bitmask(8))
    random = np.random.default_rng(4)
    rows: list[list[int]] = [[]]
    for _ in range(10):
        found = masks.of(rows)
        assert np.array_equal(found, np.stack([valid.bits(tuple(row)) for row in rows]))
        parents = random.integers(len(rows), size=8)
        following = [set(valid.after(tuple(rows[i]))) - {EOS} for i in parents]
        rows = [[*rows[i], int(random.choice(sorted(each)))]
                for i, each in zip(parents, following, strict=True)]  # fmt: skip
    invalid = min(set(range(1, 2048)) - set(valid.after(())))
    with pytest.raises(RuntimeError, match="the grammar refuses the tokens"):
        masks.of([[invalid]])
