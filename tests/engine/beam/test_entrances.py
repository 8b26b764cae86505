"""``LLM.beam_search`` and ``LLM.generate``: what goes in, what comes out, what is refused."""

import ast
import math
import time
from pathlib import Path

import numpy as np
import pytest
import vllm

from tests.engine.beam.cases import check_case, prompt, request_of
from tests.engine.beam.lora import make_adapters
from tests.engine.beam.oracle import Case, search
from tests.engine.beam.simulation import prepare_params
from tests.newer_vllm import newer_vllm
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

SHIPPED = str(model_path())
OPTIONS = {"block_size": 32, "max_model_len": 512, "max_num_seqs": 64}


def beam_params(width=4, n=None, **options):
    from vllm import SamplingParams

    sampling = {
        name: options.pop(name)
        for name in list(options)
        if name in SamplingParams.__struct_fields__
    }
    sampling = {"temperature": 0.0, "max_tokens": 12, **sampling}
    return SamplingParams(
        n=width if n is None else n, extra_args={"beam_width": width, **options}, **sampling
    )


def test_the_prompt_of_a_running_search_is_not_queued(engine):
    """A server with `max_num_queued_tokens` refuses others by it; metrics have its first token."""
    llm = engine(**OPTIONS, disable_log_stats=False)
    engine_of_llm, queued, outputs = llm.llm_engine, [], []
    text = {"prompt_token_ids": list(prompt(5, 40))}
    engine_of_llm.add_request("search", text, beam_params(max_tokens=20, min_tokens=20))
    while engine_of_llm.has_unfinished_requests():
        queued.append(engine_of_llm.output_processor.get_num_queued_tokens())
        outputs += engine_of_llm.step()
    assert queued == [40] + [0] * (len(queued) - 1)
    assert len(queued) >= 20
    [output] = outputs
    assert len(output.outputs) == 4
    assert output.num_cached_tokens == 0
    times = output.metrics
    assert times.queued_ts <= times.scheduled_ts < times.first_token_ts < times.last_token_ts


def test_a_search_that_does_not_read_the_prefix_cache(engine):
    llm = engine(**OPTIONS)
    source, cached = [{"prompt_token_ids": list(prompt(11, 80))}], []
    for skip in (None, None, True):
        params = beam_params(skip_reading_prefix_cache=skip)
        (result,) = llm.generate(source, params, use_tqdm=False)
        cached.append(result.num_cached_tokens)
    assert cached[1:] == [64, 0]


HONOURED = {
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
    "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "logprobs", "flat_logprobs", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "structured_outputs", "logit_bias", "allowed_token_ids", "extra_args", "bad_words",
    "skip_reading_prefix_cache",
}  # fmt: skip
REFUSED = {
    "min_p": 0.1, "prompt_logprobs": 1, "prompt_logprob_token_ids": [[1]],
    "prompt_logprob_start": 0, "logprob_token_ids": [1], "repetition_detection": "any",
    "thinking_token_budget": 1, "trace_decode_token_ids": [1],
}  # fmt: skip
WITHOUT_EFFECT = {
    "watermarking",  # off in searches
    "stream_interval",  # it has one output
    "routed_experts_prompt_start",  # searches are off where experts are returned
    "skip_clone", "output_text_buffer_length", "_eos_token_id", "_all_stop_token_ids",
    "_bad_words_token_ids", "_watermarking_skipped",  # vLLM's own
}  # fmt: skip


@pytest.mark.parametrize("release", ["installed", "newer"])
def test_every_sampling_parameter_is_honoured_or_refused(release):
    """One that a release of vLLM adds is for a human to judge."""
    packages = Path(vllm.__file__).parents[1]
    if release == "newer":
        packages = Path(newer_vllm()["PYTHONPATH"])
    source = ast.parse((packages / "vllm" / "sampling_params.py").read_text())
    classes = {node.name: node for node in source.body if isinstance(node, ast.ClassDef)}
    body = classes["SamplingParams"].body
    names = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
    assert names == HONOURED | REFUSED.keys() | WITHOUT_EFFECT
    for name, value in REFUSED.items():
        params = beam_params()
        setattr(params, name, value)
        with pytest.raises(ValueError, match=f"{name}=.* is not supported with beam_width"):
            prepare_params(params)


@pytest.mark.parametrize("concurrency_limit", [None, 1, 2])
@pytest.mark.parametrize("use_tqdm", [False, True])
def test_llm_beam_search(engine, concurrency_limit, use_tqdm, capsys):
    from vllm.sampling_params import BeamSearchParams

    llm = engine(**OPTIONS)
    groups = scheduler_of(llm).beam_counters.groups
    cases = [Case(prompt(i, 30 + i), 4, length_penalty=0.6) for i in range(3)]
    capsys.readouterr()
    results = llm.beam_search(
        [{"prompt_token_ids": list(case.prompt_token_ids)} for case in cases],
        BeamSearchParams(beam_width=4, max_tokens=16, length_penalty=0.6),
        use_tqdm=use_tqdm,
        concurrency_limit=concurrency_limit,
    )
    assert scheduler_of(llm).beam_counters.groups == groups + 3
    assert ("%" in capsys.readouterr().err) == use_tqdm
    tokenizer = llm.get_tokenizer()
    for case, result in zip(cases, results, strict=True):
        expected = search(SHIPPED, case)
        for sequence, (token_ids, score) in zip(result.sequences, expected, strict=True):
            assert sequence.tokens == [*case.prompt_token_ids, *token_ids]
            assert sequence.text == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            assert sequence.cum_logprob / len(token_ids) ** 0.6 == pytest.approx(score, abs=2e-4)
            assert len(sequence.logprobs) == len(token_ids)
            assert sum(
                logprobs[token].logprob
                for logprobs, token in zip(sequence.logprobs, token_ids, strict=True)
            ) == pytest.approx(sequence.cum_logprob, abs=1e-4)
            assert sequence.finish_reason in ("length", "stop")


def test_llm_beam_search_takes_text_and_more_options(engine):
    from vllm.sampling_params import BeamSearchParams

    llm = engine(**OPTIONS)
    params = BeamSearchParams(beam_width=3, max_tokens=16)
    params.early_stopping = "never"
    (result,) = llm.beam_search([{"prompt": "def main():\n"}], params)
    token_ids = llm.get_tokenizer().encode("def main():\n")
    expected = search(SHIPPED, Case(tuple(token_ids), 3, "never"))
    assert [sequence.tokens[len(token_ids) :] for sequence in result.sequences] == [
        hypothesis.token_ids for hypothesis in expected
    ]


def test_logprobs_when_asked(engine, eos_heavy_model):
    llm = engine(model=str(eos_heavy_model), **OPTIONS)
    source = {"prompt_token_ids": list(prompt(5, 40))}
    (plain,) = llm.generate([source], beam_params(4), use_tqdm=False)
    (result,) = llm.generate([source], beam_params(4, logprobs=3), use_tqdm=False)
    for without, output in zip(plain.outputs, result.outputs, strict=True):
        assert without.logprobs is None
        assert without.token_ids == output.token_ids
        assert without.cumulative_logprob == pytest.approx(output.cumulative_logprob)
        assert output.score == pytest.approx(
            output.cumulative_logprob / len(output.token_ids), abs=1e-5
        )
        total = 0.0
        for token, entries in zip(output.token_ids, output.logprobs, strict=True):
            total += entries[token].logprob
            best = sorted(entries.values(), key=lambda entry: entry.rank)
            assert [entry.rank for entry in best[:3]] == [1, 2, 3]
            assert len(entries) == (3 if entries[token].rank <= 3 else 4)
            values = [entry.logprob for entry in best]
            assert values == sorted(values, reverse=True)
        assert total == pytest.approx(output.cumulative_logprob, abs=1e-4)


def test_finish_and_stop_reasons(engine, eos_heavy_model):
    llm = engine(model=str(eos_heavy_model), **OPTIONS)
    tokenizer = llm.get_tokenizer()
    case = Case(prompt(9, 40), 9)
    stop = search(str(eos_heavy_model), case)[0].token_ids[5]
    case = case._replace(stop_token_ids=(stop,))
    text, params = request_of(case)
    (result,) = llm.generate([text], params, use_tqdm=False)
    check_case(str(eos_heavy_model), case, result)
    for output in result.outputs:
        last = output.token_ids[-1]
        if last == tokenizer.eos_token_id:
            assert (output.finish_reason, output.stop_reason) == ("stop", None)
        elif last in case.stop_token_ids:
            assert (output.finish_reason, output.stop_reason) == ("stop", last)
        else:
            assert (output.finish_reason, output.stop_reason) == ("length", None)
            assert len(output.token_ids) == case.max_tokens
        kept = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        assert output.text == tokenizer.decode(kept)
    ends = {(output.finish_reason, output.stop_reason) for output in result.outputs}
    assert ends == {("stop", None), ("stop", stop), ("length", None)}


def test_ignore_eos(engine, eos_heavy_model):
    llm = engine(model=str(eos_heavy_model), **OPTIONS)
    sources = [{"prompt_token_ids": list(prompt(i, 40))} for i in range(6)]
    results = llm.generate(sources, beam_params(4, ignore_eos=True), use_tqdm=False)
    outputs = [output for result in results for output in result.outputs]
    assert all(len(hypothesis.token_ids) == 12 for hypothesis in outputs)
    assert all(hypothesis.finish_reason == "length" for hypothesis in outputs)
    assert any(0 in hypothesis.token_ids[:-1] for hypothesis in outputs)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_hypotheses(engine, include):
    llm = engine(**OPTIONS)
    source = {"prompt": "class Stack:\n    def push(self, item):\n"}
    search_options = {"max_tokens": 16, "length_penalty": 0.0, "ignore_eos": True}
    (free,) = llm.generate([source], beam_params(6, **search_options), use_tqdm=False)
    text = free.outputs[0].text
    stops = [text[len(text) // 3 :][:2], "☃"]
    (result,) = llm.generate(
        [source],
        beam_params(6, stop=stops, include_stop_str_in_output=include, **search_options),
        use_tqdm=False,
    )
    stopped = [output for output in result.outputs if output.finish_reason == "stop"]
    assert stopped
    tokenizer = llm.get_tokenizer()
    for output in stopped:
        assert output.stop_reason in stops
        assert output.text.endswith(output.stop_reason) == include
        whole = tokenizer.decode(output.token_ids)
        before = tokenizer.decode(output.token_ids[:-1])
        assert output.stop_reason in whole
        assert not any(stop in before for stop in stops)
    for output in result.outputs:
        if output.finish_reason == "length":
            assert not any(stop in output.text for stop in stops)
    scores = [output.score for output in result.outputs]
    assert scores == sorted(scores, reverse=True)


def test_bad_words_do_not_appear(engine):
    llm = engine(**OPTIONS)
    tokenizer = llm.get_tokenizer()
    source = {"prompt": "class Stack:\n    def push(self, item):\n"}
    (free,) = llm.generate([source], beam_params(4), use_tqdm=False)
    used = {token for output in free.outputs for token in output.token_ids}
    words = {tokenizer.decode([token]).strip() for token in used}
    words = {word for word in words if word.isalpha()}
    banned = {
        encoded[0]
        for word in words
        for encoded in (tokenizer.encode(word), tokenizer.encode(f" {word}"))
        if len(encoded) == 1
    }
    assert banned & used
    (result,) = llm.generate([source], beam_params(4, bad_words=sorted(words)), use_tqdm=False)
    assert not banned & {token for output in result.outputs for token in output.token_ids}


def test_prompt_at_the_length_limit(engine):
    llm = engine(**OPTIONS)
    source = {"prompt_token_ids": list(prompt(1, 507))}
    (result,) = llm.generate([source], beam_params(4, max_tokens=100), use_tqdm=False)
    assert [len(output.token_ids) for output in result.outputs] == [5] * 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"width": 0, "n": 1}, "beam_width.*got 0"),
        ({"width": 65, "n": 1}, "max_num_seqs=64, got 65"),
        ({"width": 4, "n": 5}, "n must be at most beam_width=4, got n=5"),
        ({"early_stop": True}, "'early_stop' is unknown; did you mean 'early_stopping'"),
        ({"num_beams": 4}, "'num_beams' is unknown with 'beam_width'; use 'beam_width'"),
        ({"diversity_rate": 0.5}, "'diversity_rate' is unknown.*use 'num_beam_groups' and"),
        ({"repetition_penalty": 0.5}, "repetition_penalty=0.5"),
        ({"logit_bias": {3: math.inf}}, "logit_bias={3: inf}.*use finite numbers"),
        ({"min_p": 0.1, "temperature": 1.0}, "min_p=0.1"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprob_token_ids": np.ones((2, 1), int)}, "prompt_logprob_token_ids=array"),
        ({"do_sample": True}, "temperature"),
        ({"stop": ["x" * 257]}, "stop=.*use at most 256 characters in each"),
        ({"width": 64, "n": 1, "stop_token_ids": [*range(1024)]}, "stop_token_ids.*at most 1023,"),
        ({"num_beam_groups": 2, "diversity_penalty": 1e39}, "diversity_penalty.*got 1e"),
    ],
)
def test_bad_requests_are_refused_at_once(engine, params, message):
    llm = engine(**OPTIONS)
    with pytest.raises(ValueError, match=message):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], beam_params(**params), use_tqdm=False)
    (result,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], beam_params(2), use_tqdm=False)
    assert len(result.outputs) == 2


def test_group_that_can_never_fit_is_refused_at_once(engine):
    llm = engine(num_gpu_blocks_override=12, **{**OPTIONS, "max_model_len": 256})
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"needs at least 22 KV blocks.*the engine has 11"):
        llm.generate([{"prompt_token_ids": list(prompt(1, 200))}], beam_params(16), use_tqdm=False)
    assert time.monotonic() - start < 5


def test_arguments_of_a_custom_logits_processor_are_refused(engine, monkeypatch):
    """Rows would ignore them; without such a processor they may belong to anything."""
    llm = engine(**OPTIONS)
    source = [{"prompt_token_ids": [5, 6, 7]}]
    assert llm.generate(source, beam_params(2, target_token=7), use_tqdm=False)
    monkeypatch.setattr(
        llm.llm_engine.vllm_config.model_config, "logits_processors", ["package:Processor"]
    )
    message = r"extra_args \['target_token'\] may drive.*\(package:Processor\).*leave them out"
    with pytest.raises(ValueError, match=message):
        llm.generate(source, beam_params(2, target_token=7), use_tqdm=False)
    assert llm.generate(source, beam_params(2, speculation=False), use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "count"),
    [({"beam_width": 9}, 9), ({"length_penalty": 6.0}, 3), ({"max_tokens": 0}, 1)],
)
def test_vllm_serves_what_the_native_search_refuses(engine, options, count):
    """In ``LLM.beam_search``, which took it before."""
    from vllm.sampling_params import BeamSearchParams

    llm = engine(**{**OPTIONS, "max_num_seqs": 8})
    source = [{"prompt_token_ids": list(prompt(1, 30))}]
    params = BeamSearchParams(**{"beam_width": 3, "max_tokens": 4, **options})
    (result,) = llm.beam_search(source, params)
    assert len(result.sequences) == count
    assert scheduler_of(llm).beam_counters.groups == 0


def test_switched_off(engine, monkeypatch):
    """vLLM's own beam search is back, and ``beam_width`` is refused instead of ignored."""
    from vllm.sampling_params import BeamSearchParams

    source = [{"prompt_token_ids": list(prompt(1, 30))}]
    off = engine(additional_config={"vllm_trie": {"beam_search": False}}, **OPTIONS)
    on = engine(**OPTIONS)
    # Without ends and lengths both searches find the same.
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, length_penalty=0.0)
    stock = off.beam_search(source, params)
    native = on.beam_search(source, params)
    assert scheduler_of(off).beam_counters.groups == 0
    assert [sequence.tokens for sequence in stock[0].sequences] == [
        sequence.tokens for sequence in native[0].sequences
    ]
    with pytest.raises(ValueError, match=r"\['beam_search'\]=False turns it off"):
        off.generate(source, beam_params(3), use_tqdm=False)
    monkeypatch.setenv("VLLM_TRIE_BEAM", "0")
    groups = scheduler_of(on).beam_counters.groups
    on.beam_search(source, BeamSearchParams(beam_width=3, max_tokens=4))
    assert scheduler_of(on).beam_counters.groups == groups
    with pytest.raises(ValueError, match="VLLM_TRIE_BEAM=0 turns it off"):
        on.generate(source, beam_params(3), use_tqdm=False)


def test_scheduler_of_the_user_is_left_alone(engine):
    from vllm.sampling_params import BeamSearchParams
    from vllm.v1.core.sched.scheduler import Scheduler

    llm = engine(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler", **OPTIONS)
    assert type(scheduler_of(llm)) is Scheduler
    source = [{"prompt_token_ids": list(prompt(1, 30))}]
    (result,) = llm.beam_search(source, BeamSearchParams(beam_width=3, max_tokens=4))
    assert len(result.sequences) == 3
    with pytest.raises(ValueError, match="scheduler_cls"):
        llm.generate(source, beam_params(3), use_tqdm=False)


def test_lora_requests(engine, tmp_path):
    [adapter] = make_adapters(tmp_path, 1)
    llm = engine(enable_lora=True, max_lora_rank=8, max_loras=1, **OPTIONS)
    case = Case(prompt(2, 40), 4, max_tokens=10)
    text, params = request_of(case)
    (with_adapter,) = llm.generate([text], params, lora_request=adapter, use_tqdm=False)
    (without,) = llm.generate([text], params, use_tqdm=False)
    check_case(SHIPPED, case, without)
    check_case(str(tmp_path / "merged-1"), case, with_adapter)
    assert [output.token_ids for output in without.outputs] != [
        output.token_ids for output in with_adapter.outputs
    ]
    assert all(math.isfinite(output.score) for output in with_adapter.outputs)
