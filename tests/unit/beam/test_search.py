"""The search against the reference, on random language models."""

import doctest
import time
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from tests.unit.beam import reference as reference_module
from tests.unit.beam.models import PROMPT, VOCAB, random_model, run_search, scores_of, tokens_of
from tests.unit.beam.reference import reference_search
from vllm_trie.searches import BeamSearch, Candidates, SearchSettings
from vllm_trie.searches.candidates import CandidateRules

search_settings = st.builds(
    lambda groups, per_group, **options: SearchSettings(
        beam_width=groups * per_group, num_beam_groups=groups, **options
    ),
    groups=st.sampled_from([1, 1, 2, 3]),
    per_group=st.integers(1, 6),
    diversity_penalty=st.sampled_from([0.0, 0.7, 5.0]),
    max_new_tokens=st.integers(1, 7),
    stop_token_ids=st.sampled_from([(), (0,), (0, 3)]),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    min_tokens=st.integers(0, 3),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    bad_words=st.sampled_from([(), ((4,), (5, 6))]),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3]),
    logit_bias=st.sampled_from([(), ((2, 6.0), (0, -3.0), (5, -100.0))]),
)


def find_stop_string(token_ids: list[int]) -> str | None:
    """Tokens are letters; "bc" and "d" are the stop strings."""
    text = "".join("abcdefghijkl"[token] for token in token_ids)
    return next((stop for stop in ("bc", "d") if text.endswith(stop)), None)


@given(
    search_settings=search_settings,
    seed=st.integers(0, 10**6),
    peaked=st.sampled_from([0.5, 1.5, 4.0]),
    find_stop=st.sampled_from([lambda token_ids: None, find_stop_string]),
    has_ties=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_equals_reference(search_settings, seed, peaked, find_stop, has_ties):
    model = random_model(seed, peaked)
    if has_ties:  # of a row, the likelier one without rules comes first
        penalties = dict.fromkeys(
            ("diversity_penalty", "presence_penalty", "frequency_penalty"), 0.0
        )
        search_settings = replace(
            search_settings, **penalties, repetition_penalty=1.0, logit_bias=()
        )
        model = lambda token_ids, exact=model: exact(token_ids).round()  # noqa: E731
    hypotheses = run_search(model, search_settings, find_stop_string=find_stop).hypotheses()
    expected = reference_search(model, search_settings, PROMPT, find_stop)
    assert tokens_of(hypotheses) == tokens_of(expected)
    scores = scores_of(expected)
    if search_settings.num_beam_groups > 1:  # penalties are added in another order
        last_place = float(np.finfo(np.float32).eps) * max(map(abs, scores), default=0.0)
        scores = pytest.approx(scores, rel=1e-5, abs=last_place)  # of sums that may cancel out
    assert scores_of(hypotheses) == scores
    for hypothesis in hypotheses:
        tokens = hypothesis.token_ids
        stop = find_stop(tokens) if len(tokens) > search_settings.min_tokens else None
        if tokens[-1] in search_settings.stop_token_ids:
            continue
        assert hypothesis.stop == stop
        assert hypothesis.reason == ("stop" if stop else "length")


@given(
    prompt=st.lists(st.integers(0, 3), max_size=8),
    generated=st.lists(st.integers(0, 3), max_size=6),
    size=st.integers(1, 4),
)
def test_no_sequence_repeats(prompt, generated, size):
    """Against every sequence of prompt and hypothesis, and within the candidates asked for."""
    search_settings = SearchSettings(2, 7, no_repeat_ngram_size=size)
    rules = CandidateRules(search_settings, prompt)
    logprobs = rules.apply(np.arange(4), np.zeros(4, dtype=np.float32), generated)
    tokens = [*prompt, *generated]
    sequences = [tokens[start : start + size] for start in range(len(tokens) - size + 1)]
    repeating = [[*tokens, token][-size:] in sequences for token in range(4)]
    assert np.isneginf(logprobs).tolist() == repeating
    count = rules.num_raw(np.array([generated], dtype=np.int64), 100)
    assert count == search_settings.num_candidates + sum(repeating)


@pytest.mark.parametrize("prompt", [[7] * 8000, [token % 97 for token in range(8000)]])
def test_long_sequences_cost_a_step_little(prompt):
    """In time and memory; a dictionary of all of them took 0.36 s and 57 MiB."""
    tracemalloc.start()
    begin = time.process_time()
    rules = CandidateRules(SearchSettings(1, 8, no_repeat_ngram_size=1024), prompt)
    assert rules.num_raw(np.zeros((1, 0), dtype=np.int64), 100) == 3
    rules.apply(np.arange(4), np.zeros(4, dtype=np.float32), [])
    spent, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 0.3
    assert peak < 1 << 20


@pytest.mark.parametrize("penalty", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}])
def test_penalties_need_no_candidates_of_tokens_to_come(penalty):
    rules = CandidateRules(SearchSettings(2, 30_000, **penalty), [])
    assert rules.num_raw(np.zeros((2, 5), dtype=np.int64), 50_000) == 4 + 5


def test_logprobs_and_places_describe_the_path():
    search_settings = SearchSettings(3, 5, (0,))
    model = random_model(5)
    for hypothesis in run_search(model, search_settings).hypotheses():
        for length, (token, logprob) in enumerate(
            zip(hypothesis.token_ids, hypothesis.logprobs, strict=True)
        ):
            expected = model(hypothesis.token_ids[:length])
            assert logprob == expected[token]
            step, _, position = hypothesis.places[length]
            assert step == length
            assert np.argsort(-expected, kind="stable")[position] == token
        assert hypothesis.sum_logprob == pytest.approx(sum(hypothesis.logprobs), rel=1e-5)


def test_trace_holds_the_whole_search():
    search_settings = SearchSettings(3, 6, (0,), trace=True)
    search = run_search(random_model(8), search_settings)
    hypotheses = search.hypotheses()
    trace = search.trace
    assert trace.steps == search.steps
    for hypothesis, node in zip(hypotheses, trace.returned, strict=True):
        assert trace.fates[node] == "finished"
        path = []
        while node >= 0:
            path.append(trace.token_ids[node])
            node = trace.parents[node]
        assert path[::-1] == hypothesis.token_ids
    assert set(trace.fates) == {"kept", "dropped", "finished"}
    assert len(trace.fates) == search.steps * search_settings.num_candidates
    # only kept nodes have children
    assert {trace.fates[parent] for parent in trace.parents if parent >= 0} == {"kept"}


def test_sampled_pairs_are_drawn_without_replacement():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logprobs = np.log(probabilities).astype(np.float32)
    draws = 4000
    counts = Counter()
    for seed in range(draws):
        search_settings = SearchSettings(2, 1, do_sample=True, seed=seed)
        hypotheses = run_search(lambda tokens: logprobs, search_settings, vocab=4).hypotheses()
        counts[frozenset(hypothesis.token_ids[0] for hypothesis in hypotheses)] += 1
    for pair, count in counts.items():
        first, second = (probabilities[token] for token in pair)
        expected = first * second / (1 - first) + second * first / (1 - second)
        assert count / draws == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("seed", range(9))
def test_sampling_is_reproducible_and_ends_at_stop_strings(seed):
    def find(token_ids):
        return "stop" if token_ids[-1] % 2 else None

    search_settings = SearchSettings(3, 4, (0,), do_sample=True, seed=seed, top_k=9)
    runs = [run_search(random_model(4), search_settings, (), find) for _ in range(2)]
    first, second = (search.hypotheses() for search in runs)
    assert [hypothesis[:6] for hypothesis in first] == [hypothesis[:6] for hypothesis in second]
    assert not any(token % 2 for hypothesis in first for token in hypothesis.token_ids[:-1])


@given(
    seed=st.integers(0, 10**6),
    stop_token_ids=st.sampled_from([(), (0,), (0, 3)]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 30]),
    top_p=st.sampled_from([0.01, 0.4, 0.8, 1.0]),
)
def test_sampling_is_filtered_as_in_transformers(seed, stop_token_ids, temperature, top_k, top_p):
    logprobs = random_model(seed)([])
    search_settings = SearchSettings(
        3, 4, stop_token_ids, do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p
    )
    rules = CandidateRules(search_settings, [])
    expected = torch.from_numpy(logprobs)[None] / temperature
    num_kept = {"min_tokens_to_keep": max(2, 1 + len(stop_token_ids))}
    if top_k:
        expected = TopKLogitsWarper(top_k, **num_kept)(None, expected)
        num_raw = rules.num_raw(np.zeros((1, 0), dtype=np.int64), VOCAB)
        assert num_raw == int(expected.isfinite().sum())
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p, **num_kept)(None, expected)
    filtered = rules.apply(np.arange(VOCAB), logprobs, [])
    np.testing.assert_allclose(filtered, expected[0].numpy(), rtol=1e-6)


def candidates(token_ids, logprobs):
    return Candidates.of_rows(np.array(token_ids), np.array(logprobs, dtype=np.float32))


def test_of_drawn_candidates_the_likeliest_go_on():
    drawn = candidates([[5, 6, 7, 8]], [[-1, -2, -3, -4]])._replace(keys=np.arange(4.0))
    search = BeamSearch(SearchSettings(2, 3, do_sample=True))
    assert search.advance(drawn).token_ids.tolist() == [5, 6]


def test_nan_logprobs_end_the_search_without_an_error():
    search = BeamSearch(SearchSettings(2, 4))
    assert not len(search.advance(candidates([[1, 2, 3]], [[np.nan] * 3])))
    assert search.done
    assert search.hypotheses() == []


def test_misuse_is_refused():
    search = BeamSearch(SearchSettings(2, 1))
    with pytest.raises(ValueError, match="rows 0 to 0 in ascending order, got rows 0 to 1"):
        search.advance(candidates([[0, 1], [0, 1]], [[-0.5, -1.0], [-0.5, -1.0]]))
    search.advance(candidates([[0, 1]], [[-0.5, -1.0]]))
    with pytest.raises(ValueError, match="done"):
        search.advance(candidates([[0, 1]], [[-0.5, -1.0]]))


def test_docstring_example_of_the_reference():
    assert doctest.testmod(reference_module).failed == 0
