"""Random requests in engines with little room: trees give the output of plain vLLM.

Other files test each sampling parameter alone. Here they meet in one batch, with requests that
arrive late, are aborted or preempted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config.reasoning import ReasoningConfig
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tests.engine.compare import accepted_tokens, preemptions, speculation
from tests.engine.prompts import prompts
from vllm_trie.lab.tiny_model import medusa_path

COUNT, VOCAB_SIZE, LONGEST_PROMPT = 16, 2048, 400
HEADS = str(medusa_path())
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "parts of prompts": (
        {"max_num_batched_tokens": 64, "max_num_seqs": 5, "block_size": 64},
        speculation("ngram_trie", 40, recycle=True),
    ),
    "chains": (
        {"max_num_batched_tokens": 96, "max_num_seqs": 6, "block_size": 32},
        speculation(
            "trie_union", 12, drafters=["ngram", "medusa"], model=HEADS, verification="chain"
        ),
    ),
    "little memory": (
        {"num_gpu_blocks_override": 20, "max_model_len": 544, "block_size": 32},
        speculation("lookahead_trie", 59),
    ),
    "priorities": (
        {"scheduling_policy": "priority", "max_num_seqs": 3, "block_size": 32},
        speculation("trie_union", 100, drafters=["ngram", "medusa"], model=HEADS),
    ),
    "adaptive budget": (
        {"max_num_seqs": 16, "max_num_batched_tokens": 16384},
        speculation("medusa_dynamic", 24, node_budget="adaptive", model=HEADS),
    ),
}
THINKING = {"reasoning_start_str": "(", "reasoning_end_str": ":\n"}
"""As the model writes much of it, one answer may begin to think several times."""
STRUCTURED = (
    {"regex": r"(def|class) [a-z]{3,9}\([a-z, ]{0,12}\):"},
    {"choice": ["positive", "negative", "not at all sure about that"]},
    {"json": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 9}},
)


@dataclass(frozen=True)
class Request:
    prompt: dict[str, Any]
    params: SamplingParams
    priority: int
    arrives_at: int
    """Step of the engine."""
    aborted_after: int | None
    """Steps from its arrival."""


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    text: str
    ended: tuple[str | None, int | str | None]
    logprobs: list[dict[int, float]]


def random_request(rng: random.Random, seeds: bool) -> Request:
    """Args: seeds: whether it may have one; vLLM on a CPU has none for prompts in parts."""
    text = [t for prompt in rng.sample(prompts(), 3) for t in prompt["prompt_token_ids"]]
    if rng.random() < 0.2:
        text = rng.choices(range(VOCAB_SIZE), k=LONGEST_PROMPT)
    length = rng.choice([rng.randint(1, 8), rng.randint(1, 100), rng.randint(1, LONGEST_PROMPT)])
    max_tokens = rng.choice([1, 2, rng.randint(3, 30), rng.randint(30, 120)])
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}

    def maybe(probability: float, **more: Any) -> None:
        if rng.random() < probability:
            options.update(more)

    maybe(0.5, ignore_eos=True)
    maybe(0.2, stop=rng.sample(["return", "):", "self", "\n\n", "="], 2))
    maybe(0.1, include_stop_str_in_output=True)
    maybe(0.2, stop_token_ids=rng.choices(text, k=2))
    maybe(0.2, min_tokens=rng.randint(1, max_tokens))
    maybe(0.15, bad_words=["return", "for i in"])
    maybe(0.3, logprobs=rng.choice([0, 1, 5]))
    maybe(0.1, repetition_penalty=rng.choice([0.9, 1.3]))
    maybe(0.1, presence_penalty=0.5, frequency_penalty=rng.choice([-0.3, 0.4]))
    maybe(0.1, allowed_token_ids=list(range(100, 1200)))
    maybe(0.1, extra_args={"speculation": False})
    maybe(0.3, thinking_token_budget=rng.randint(0, 12))
    if seeds:
        maybe(0.3, temperature=0.8, seed=rng.randrange(1000), top_p=0.9, n=rng.randint(1, 3))
    if rng.random() < 0.2 and not {"bad_words", "allowed_token_ids"} & options.keys():
        options["structured_outputs"] = StructuredOutputsParams(**rng.choice(STRUCTURED))
        options.pop("ignore_eos", None)
        options.pop("thinking_token_budget", None)  # the token that it forces may break a grammar
    return Request(
        prompt={"prompt_token_ids": text[:length]},
        params=SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY),
        priority=rng.randrange(3),
        arrives_at=rng.choice([0, 0, rng.randint(1, 40)]),
        aborted_after=rng.randint(1, 30) if rng.random() < 0.1 else None,
    )


def run(llm: Any, requests: Sequence[Request], with_priorities: bool) -> dict[int, list[Answer]]:
    """Return the answers of the requests that were not aborted, by their index."""
    core, answers, step = llm.llm_engine, {}, 0
    last_arrival = max(request.arrives_at for request in requests)
    while step <= last_arrival or core.has_unfinished_requests():
        for index, request in enumerate(requests):
            if request.arrives_at == step:
                priority = {"priority": request.priority} if with_priorities else {}
                core.add_request(str(index), request.prompt, request.params.clone(), **priority)
            if request.aborted_after == step - request.arrives_at:
                core.abort_request([str(index)])
        for output in core.step():
            index = int(output.request_id)
            if output.finished and requests[index].aborted_after is None:
                answers[index] = [answer(choice) for choice in output.outputs]
        step += 1
        assert step < 20000
    return answers


def answer(choice: Any) -> Answer:
    return Answer(
        token_ids=list(choice.token_ids),
        text=choice.text,
        ended=(choice.finish_reason, choice.stop_reason),
        logprobs=[{t: p.logprob for t, p in place.items()} for place in choice.logprobs or ()],
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_random_requests(engine, name):
    options, trees = SETTINGS[name]
    options = {**options, "reasoning_config": ReasoningConfig(**THINKING)}
    rng = random.Random(name)
    seeds = options.get("max_num_batched_tokens") == 16384
    requests = [random_request(rng, seeds) for _ in range(COUNT)]
    with_priorities = "scheduling_policy" in options
    expected = run(engine(**options), requests, with_priorities)
    llm = engine(**options, **trees)
    before = accepted_tokens(llm)
    with preemptions(llm) as preempted:
        answers = run(llm, requests, with_priorities)
    assert answers.keys() == expected.keys()
    for index in expected:
        for left, right in zip(expected[index], answers[index], strict=True):
            assert right.token_ids == left.token_ids, requests[index]
            assert (right.text, right.ended) == (left.text, left.ended), requests[index]
            for a, b in zip(left.logprobs, right.logprobs, strict=True):
                assert b == pytest.approx(a, abs=1e-4), requests[index]
    assert accepted_tokens(llm) > before
    assert bool(preempted) == (name == "little memory")
