"""All hypotheses, their order and scores against ``transformers``, in every mode of the engine."""

import pytest

from tests.engine.beam.cases import (
    all_cases,
    few_cases,
    greedy_requests,
    prompt,
    run_cases,
    run_mixed,
)
from tests.engine.beam.oracle import Case, search
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

SHIPPED = str(model_path())
SMALL_BLOCKS = {"block_size": 32, "max_model_len": 512, "max_num_seqs": 64}


def test_every_width_and_mode(engine, eos_heavy_model):
    """All at once, 576 hypotheses; and some of them, with each width, one after the other.

    The model ends many hypotheses early.
    """
    path = str(eos_heavy_model)
    llm = engine(model=path, **SMALL_BLOCKS)
    cases = all_cases()
    lengths = [len(hypothesis.token_ids) for case in cases for hypothesis in search(path, case)]
    assert sum(length < 16 for length in lengths) > len(lengths) / 3
    assert len(set(lengths)) > 8
    assert run_cases(llm, path, cases) == 576
    alone = cases[::5]
    assert {case.beam_width for case in alone} == {case.beam_width for case in cases}
    for case in alone:
        run_cases(llm, path, [case])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 48, "max_num_seqs": 24}, id="chunked prefill"),
        pytest.param({"enable_prefix_caching": False}, id="no prefix caching"),
        pytest.param({"num_gpu_blocks_override": 12, "max_model_len": 256}, id="preemption"),
        pytest.param(
            {"num_gpu_blocks_override": 12, "max_model_len": 256, "enable_prefix_caching": False},
            id="preemption, no prefix caching",
        ),
        pytest.param({"scheduling_policy": "priority"}, id="priority policy"),
    ],
)
def test_beside_greedy_requests(engine, options):
    """Beam and ordinary requests in one batch; neither changes the other."""
    llm = engine(**{**SMALL_BLOCKS, **options})
    cases = few_cases(length=150 if "max_num_batched_tokens" in options else 40)
    preempted = scheduler_of(llm).beam_counters.beams_preempted
    run_mixed(llm, SHIPPED, cases, greedy_requests(12))
    if "num_gpu_blocks_override" in options:
        assert scheduler_of(llm).beam_counters.beams_preempted > preempted


def test_multiple_stop_tokens(engine):
    """With s stop tokens the search looks at (1 + s) * b candidates."""
    source = prompt(3, 200)
    cases = [
        Case(prompt(number, 40), width, early_stopping, stop_token_ids=stops)
        for number, (width, early_stopping, stops) in enumerate(
            [(4, False, source[5:6]), (9, True, source[20:23]), (3, "never", source[40:44])]
        )
    ]
    run_cases(engine(**SMALL_BLOCKS), SHIPPED, cases)


def test_repetition_penalty_and_min_tokens(engine, eos_heavy_model):
    path = str(eos_heavy_model)
    cases = [
        Case(prompt(1, 60), 4, repetition_penalty=1.3),
        Case(prompt(2, 30), 9, repetition_penalty=1.1, min_tokens=9),
        Case(prompt(3, 30), 3, min_tokens=12, early_stopping=True),
        Case(prompt(4, 45), 5, min_tokens=3, length_penalty=0.0),
    ]
    run_cases(engine(model=path, **SMALL_BLOCKS), path, cases)


def test_no_sequence_repeats(engine):
    """Code repeats itself: the rule changes all of these searches."""
    cases = [
        Case(prompt(1, 60), 4, no_repeat_ngram_size=1),
        Case(prompt(2, 90), 9, no_repeat_ngram_size=2),
        Case(prompt(3, 200), 5, "never", 2.0, no_repeat_ngram_size=3),
        Case(prompt(4, 60), 4, no_repeat_ngram_size=2, repetition_penalty=1.2),
        Case(prompt(5, 120), 1, max_tokens=40, no_repeat_ngram_size=3),
    ]
    for case in cases:
        assert search(SHIPPED, case) != search(SHIPPED, case._replace(no_repeat_ngram_size=0))
    run_cases(engine(**SMALL_BLOCKS), SHIPPED, cases)
