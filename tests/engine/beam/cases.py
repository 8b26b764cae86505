"""Searches that the engine and the oracle are compared on."""

from __future__ import annotations

import functools
import inspect
import itertools
import json.decoder
import random
import textwrap
from typing import Any

from transformers import AutoTokenizer

from tests.engine.beam.oracle import Case, search
from vllm_trie.lab.local_engine import scheduler_of
from vllm_trie.lab.tiny_model import model_path

WIDTHS = (1, 3, 4, 9, 15, 16)
EARLY_STOPPING = (False, True, "never")
LENGTH_PENALTIES = (0.0, 0.6, 1.0, 2.0)

SCORE_TOLERANCE = 2e-4
"""Two float32 implementations of the same model differ by a few units of 1e-6 per token."""


@functools.lru_cache(maxsize=1)
def source_token_ids() -> list[int]:
    """Tokens of some Python source: the shipped model's kind of text."""
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    return tokenizer.encode(inspect.getsource(textwrap) + inspect.getsource(json.decoder))


def prompt(number: int, length: int) -> tuple[int, ...]:
    """A prompt of `length` tokens; equal numbers give equal prompts."""
    source = source_token_ids()
    start = number * 97 % (len(source) - length)
    return tuple(source[start : start + length])


def all_cases(max_tokens: int = 16) -> list[Case]:
    """Every width with every mode of early stopping and length penalty."""
    return [
        Case(prompt(number, 20 + 3 * number % 31), width, early_stopping, penalty, max_tokens)
        for number, (width, early_stopping, penalty) in enumerate(
            itertools.product(WIDTHS, EARLY_STOPPING, LENGTH_PENALTIES)
        )
    ]


def few_cases(length: int = 40, max_tokens: int = 24) -> list[Case]:
    """A handful, for the modes of the engine."""
    return [
        Case(prompt(number, length + number), width, early_stopping, penalty, max_tokens)
        for number, (width, early_stopping, penalty) in enumerate(
            [(3, False, 1.0), (4, True, 0.6), (9, "never", 2.0), (4, "never", 0.0), (9, False, 0.0)]
        )
    ]


def request_of(case: Case, n: int | None = None) -> tuple[dict[str, Any], Any]:
    """Prompt and sampling parameters for the engine."""
    from vllm import SamplingParams

    params = SamplingParams(
        n=case.beam_width if n is None else n,
        temperature=0.0,
        max_tokens=case.max_tokens,
        min_tokens=case.min_tokens,
        repetition_penalty=case.repetition_penalty,
        stop_token_ids=list(case.stop_token_ids),
        extra_args={
            "beam_width": case.beam_width,
            "early_stopping": case.early_stopping,
            "length_penalty": case.length_penalty,
            "no_repeat_ngram_size": case.no_repeat_ngram_size,
        },
    )
    return {"prompt_token_ids": list(case.prompt_token_ids)}, params


def check_case(path: str, case: Case, result: Any, n: int | None = None) -> int:
    """Compare one result with the oracle; the number of hypotheses compared.

    Args:
        n: The number of hypotheses that were asked for, if not all.
    """
    expected = search(path, case)
    assert len(expected) == case.beam_width
    expected = expected[:n]
    for output, (token_ids, score) in zip(result.outputs, expected, strict=True):
        assert list(output.token_ids) == token_ids, case
        if score is not None:
            assert abs(output.score - score) < SCORE_TOLERANCE, case
    return len(expected)


def run_cases(llm: Any, path: str, cases: list[Case]) -> int:
    """Run cases together and compare all of them; the number of hypotheses compared."""
    requests = [request_of(case) for case in cases]
    results = llm.generate(
        [text for text, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    return sum(check_case(path, case, result) for case, result in zip(cases, results, strict=True))


def greedy_requests(count: int, max_tokens: int = 40) -> list[tuple[dict[str, Any], Any]]:
    """Ordinary requests: prompts and sampling parameters."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [({"prompt_token_ids": list(prompt(50 + i, 30 + i))}, params) for i in range(count)]


def run_mixed(
    llm: Any, path: str, cases: list[Case], greedy: list[tuple[dict[str, Any], Any]]
) -> int:
    """Run cases and ordinary requests in the same batches; neither may change the other.

    Returns:
        The number of hypotheses compared with the oracle.
    """
    texts, params = map(list, zip(*greedy, strict=True))
    alone = [
        list(result.outputs[0].token_ids) for result in llm.generate(texts, params, use_tqdm=False)
    ]
    beams = [request_of(case) for case in cases]
    # One of each kind in turn, then what is left of the longer list.
    requests = [request for pair in zip(greedy, beams, strict=False) for request in pair]
    requests += greedy[len(beams) :] + beams[len(greedy) :]
    results = llm.generate(
        [text for text, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    searched = [result for result in results if hasattr(result.outputs[0], "score")]
    others = [result for result in results if not hasattr(result.outputs[0], "score")]
    assert [list(result.outputs[0].token_ids) for result in others] == alone
    return sum(check_case(path, case, result) for case, result in zip(cases, searched, strict=True))


def run_with_aborts(
    llm: Any,
    path: str,
    num_searches: int,
    greedy: list[tuple[dict[str, Any], Any]],
    fewer: bool = False,
) -> int:
    """Run random searches and ordinary requests that come at random times; some are aborted.

    Args:
        fewer: Whether searches return fewer hypotheses than they have beams.

    Returns:
        The number of hypotheses compared with the oracle.
    """
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(num_searches)
    cases = {
        f"case {number}": Case(
            prompt(number % 12, rng.randint(5, 60)),
            rng.choice([1, 2, 3, 5, 7]),
            rng.choice([True, False, "never"]),
            rng.choice([0.0, 0.6, 1.0]),
            rng.randint(1, 16),
        )
        for number in range(num_searches * 5 // 4)
    }
    victims = set(list(cases)[num_searches:])
    counts = {name: rng.randint(1, case.beam_width) for name, case in cases.items() if fewer}
    requests = {name: request_of(case, counts.get(name)) for name, case in cases.items()}
    ordinary = {f"ordinary {number}": request for number, request in enumerate(greedy)}
    alone = {
        name: llm.generate([text], params, use_tqdm=False)[0].outputs[0].token_ids
        for name, (text, params) in ordinary.items()
    }
    requests |= ordinary
    names = list(requests)
    rng.shuffle(names)
    engine, scheduler = llm.llm_engine, scheduler_of(llm)
    finished: dict[str, Any] = {}
    to_abort = []
    while names or engine.has_unfinished_requests():
        if names:
            text, params = requests[name := names.pop()]
            params.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(name, text, params)
            to_abort += [name] if name in victims else []
        for _ in range(rng.choice([0, 1, 3])):
            finished.update((result.request_id, result) for result in engine.step())
            scheduler.check_integrity()
        if to_abort and rng.random() < 0.5:
            engine.abort_request([to_abort.pop()])
    assert all(finished[name].outputs[0].token_ids == alone[name] for name in ordinary)
    return sum(
        check_case(path, case, finished[name], counts.get(name))
        for name, case in cases.items()
        if name not in victims
    )
