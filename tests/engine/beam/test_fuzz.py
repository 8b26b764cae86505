"""Random beam and ordinary requests with aborts in a real engine whose pool is too small."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.plugins import load_general_plugins

from tests.engine.beam.cases import prompt
from tests.engine.compare import step_to_the_end
from tests.engine.conftest import scheduler_of


def random_request(rng: random.Random, number: int) -> tuple[list[int], Any]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokens = list(prompt(rng.randint(0, 5), rng.randint(5, 90)))
    options: dict[str, Any] = {
        "max_tokens": rng.randint(1, 20),
        "temperature": 0.0,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    if number % 3 == 0:
        return tokens, SamplingParams(**options)
    width = rng.randint(1, 5)
    return tokens, SamplingParams(
        n=rng.randint(1, width),
        extra_args={
            "beam_width": width,
            "early_stopping": rng.choice([True, False, "never"]),
            "length_penalty": rng.choice([0.0, 1.0]),
        },
        **options,
    )


OPTIONS: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 160,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 9,
}


@pytest.fixture(scope="module")
def requests():
    load_general_plugins()  # without them vLLM refuses `n` in a greedy request
    rng = random.Random(0)
    return [random_request(rng, number) for number in range(45)]


@pytest.fixture(scope="module")
def alone(_engines, eos_heavy_model, requests):
    """The outputs of each request alone in an engine."""
    llm = _engines(model=str(eos_heavy_model), enable_prefix_caching=False, **OPTIONS)
    results = [
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
        for tokens, params in requests
    ]
    return [[list(output.token_ids) for output in result.outputs] for result in results]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_random_load_with_aborts(engine, eos_heavy_model, requests, alone, prefix_caching):
    llm = engine(model=str(eos_heavy_model), enable_prefix_caching=prefix_caching, **OPTIONS)
    rng = random.Random(prefix_caching)
    llm_engine = llm.llm_engine
    finished: dict[str, list[list[int]]] = {}
    aborted: set[str] = set()
    preempted = scheduler_of(llm).beam_counters.beams_preempted

    def step() -> None:
        for result in llm_engine.step():
            finished[result.request_id] = [list(output.token_ids) for output in result.outputs]
        scheduler_of(llm).check_integrity()

    for number, (tokens, params) in enumerate(requests):
        llm_engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
        for _ in range(rng.choice([0, 0, 1, 3])):
            step()
        if rng.random() < 0.15:
            victim = str(rng.randint(0, number))
            llm_engine.abort_request([victim])
            aborted.add(victim)
    while llm_engine.has_unfinished_requests():
        step()
    compared = 0
    for number, expected in enumerate(alone):
        if str(number) in aborted and str(number) not in finished:
            continue
        assert finished[str(number)] == expected, requests[number]
        compared += 1
    assert compared > 30
    assert scheduler_of(llm).beam_counters.beams_preempted > preempted
    scheduler = scheduler_of(llm)
    step_to_the_end(llm)
    assert not scheduler.requests
    assert not scheduler.beam_groups.by_id
