"""Plain vLLM against the same engine with trees."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.drafters import DRAFTERS, OracleDrafter
from vllm_trie.drafts import register, registry
from vllm_trie.lab.local_engine import scheduler_of, verifier_of, without_memory

Prompt = dict[str, list[int]]


def register_test_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test drafters methods until `monkeypatch` undoes it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for drafter in DRAFTERS:
        register(drafter)


def speculation(method: str, num_nodes: int, **options: Any) -> dict[str, Any]:
    """Engine options for a tree method; the budget is fixed, so that every node is verified.

    The tests share engines and prompts. A drafter that remembers the answers would rarely be wrong.
    """
    settings = {"num_speculative_tokens": num_nodes, "node_budget": "fixed", **options}
    if method == "ngram_trie":
        settings = without_memory(method) | settings
    return {"speculative_config": {"method": method, **settings}}


def generate(
    llm: Any,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    batch_size: int | None = None,
) -> list[Any]:
    """Outputs in order, at most `batch_size` requests at a time."""
    if batch_size is None:
        return llm.generate(list(prompts), params, use_tqdm=False)
    outputs = []
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        some = params[part] if isinstance(params, Sequence) else params
        outputs += llm.generate(list(prompts[part]), some, use_tqdm=False)
    return outputs


def plain_outputs(
    llm: Any, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[Any]:
    """Plain vLLM's outputs, which the oracle drafter then knows."""
    outputs = generate(llm, prompts, params)
    tell_oracle(outputs)
    return outputs


def largest_score_error(llm: Any, prompts: Sequence[Prompt], num_tokens: int) -> float:
    """Search, and compute each hypothesis at once; the greatest difference of log-probabilities."""
    search = SamplingParams(
        n=3, temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False,
        extra_args={"beam_width": 3},
    )  # fmt: skip
    results = generate(llm, prompts, search)
    hypotheses = [(result.prompt_token_ids, out) for result in results for out in result.outputs]
    texts: list[Prompt] = [
        {"prompt_token_ids": [*source, *out.token_ids]} for source, out in hypotheses
    ]
    at_once = SamplingParams(
        max_tokens=1, prompt_logprobs=0, detokenize=False, extra_args={"speculation": False}
    )
    errors = []
    for (source, out), scored in zip(hypotheses, generate(llm, texts, at_once), strict=True):
        logprobs = scored.prompt_logprobs[len(source) :]
        pairs = zip(logprobs, out.token_ids, strict=True)
        total = sum(of_token[token_id].logprob for of_token, token_id in pairs)
        errors.append(abs(total - out.cumulative_logprob))
    return max(errors)


def tell_oracle(outputs: Iterable[Any]) -> None:
    """Let the oracle drafter know the right answers."""
    for output in outputs:
        OracleDrafter.answers[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)


def differences(expected: Sequence[Any], outputs: Sequence[Any]) -> list[str]:
    """Where two lists of request outputs differ in tokens, text or reason to stop."""
    problems = []
    for index, (left, right) in enumerate(zip(expected, outputs, strict=True)):
        for a, b in zip(left.outputs, right.outputs, strict=True):
            if list(a.token_ids) != list(b.token_ids):
                pairs = enumerate(zip(a.token_ids, b.token_ids, strict=False))
                at = next((i for i, (x, y) in pairs if x != y), "the end")
                problems.append(f"prompt {index}: tokens differ from {at}")
            elif (a.text, a.finish_reason, a.stop_reason) != (
                b.text,
                b.finish_reason,
                b.stop_reason,
            ):
                problems.append(f"prompt {index}: {a.finish_reason} against {b.finish_reason}")
    return problems


def margins(expected: Sequence[Any], outputs: Sequence[Any]) -> list[float | None]:
    """How close a call the first token that differs was, for each request; None if none differs.

    In low precision a tree step rounds otherwise than a plain one, which may only decide near-ties.

    Args:
        expected: outputs with two logprobs for each token; the margin is the difference of the
            better two.
        outputs: for the same prompts.
    """
    close_calls: list[float | None] = []
    for left, right in zip(expected, outputs, strict=True):
        a, b = left.outputs[0], right.outputs[0]
        pairs = enumerate(zip(a.token_ids, b.token_ids, strict=True))
        at = next((i for i, (x, y) in pairs if x != y), None)
        if at is None:
            close_calls.append(None)
            continue
        best, second = sorted((p.logprob for p in a.logprobs[at].values()), reverse=True)[:2]
        close_calls.append(best - second)
    return close_calls


def accepted_tokens(llm: Any) -> int:
    """Draft tokens that this engine has accepted so far: all output but one token a step."""
    totals = verifier_of(llm).totals
    return totals.tokens - totals.steps


def draft_tokens(llm: Any) -> tuple[int, int]:
    """Accepted and rejected draft tokens of the engine that was started last."""
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    return accepted, counters["vllm:spec_decode_num_draft_tokens"] - accepted


def check_same_outputs(
    llm: Any,
    expected: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    batch_size: int | None = None,
) -> float:
    """The same prompts must bring the same outputs; returns draft tokens accepted per output token.

    Args:
        llm: an engine with trees.
        expected: plain vLLM's outputs.
        params, batch_size: as for :func:`generate`.
    """
    before = accepted_tokens(llm)
    some: list[Prompt] = [{"prompt_token_ids": list(o.prompt_token_ids)} for o in expected]
    outputs = generate(llm, some, params, batch_size)
    assert differences(expected, outputs) == []
    accepted = accepted_tokens(llm) - before
    return accepted / sum(len(o.outputs[0].token_ids) for o in outputs)


def check_outputs_beside_aborts(
    llm: Any, expected: Sequence[Any], params: SamplingParams, aborts: Mapping[int, Sequence[int]]
) -> None:
    """Requests that stay must bring the same outputs while others are aborted midway.

    Their ids start with `abort-`; afterwards the engine has had occasion to forget them.

    Args:
        llm, expected: as for :func:`check_same_outputs`.
        params: of all requests.
        aborts: indices of the requests to abort, by the number of steps after which.
    """
    core = llm.llm_engine
    for index, plain in enumerate(expected):
        prompt = {"prompt_token_ids": list(plain.prompt_token_ids)}
        # With a salt of their own they are not answered from memory, before they are aborted.
        core.add_request(f"abort-{index}", {**prompt, "cache_salt": "aborts"}, params)
    finished, steps = {}, 0
    ended_before: list[str] = []
    while core.has_unfinished_requests():
        finished |= {o.request_id: o for o in core.step() if o.finished}
        steps += 1
        now = [f"abort-{i}" for i in aborts.get(steps, ())]
        ended_before += [name for name in now if name in finished]
        core.abort_request(now)
    assert not ended_before
    gone = {i for some in aborts.values() for i in some}
    survivors = [i for i in range(len(expected)) if i not in gone]
    outputs = [finished[f"abort-{i}"] for i in survivors]
    assert differences([expected[i] for i in survivors], outputs) == []
    # Requests that have ended are forgotten in the next step.
    generate(llm, [prompt], SamplingParams(temperature=0.0, max_tokens=2))


def session_answers(
    llm: Any,
    sessions: Sequence[Sequence[list[int]]],
    params: SamplingParams,
    waits: bool,
    others: tuple[Sequence[Prompt], SamplingParams] = ((), SamplingParams()),
) -> tuple[list[list[list[int]]], list[Any]]:
    """Answers of sessions, whose prompts come in parts, and outputs of requests next to them.

    Args:
        sessions: The parts of each prompt.
        waits: whether a part is sent when the last one is answered, or all at once.
        others: prompts and parameters of the other requests.

    Returns:
        The output tokens of each part of each session; the others' outputs.
    """
    core = llm.llm_engine
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    rest = [list(parts) for parts in sessions]
    answers: list[list[list[int]]] = [[[]] for _ in sessions]
    outputs: dict[int, Any] = {}

    def send(index: int) -> None:
        part = rest[index].pop(0) if rest[index] else None
        request = core.input_processor.process_inputs(
            f"session-{index}",
            {"prompt_token_ids": list(part or [0])},
            params,
            core.get_supported_tasks(),
            resumable=part is not None,
        )
        request.external_req_id = request.request_id
        # As in the front end's process: it adds the parts to its list of tokens.
        core.output_processor.add_request(copy.deepcopy(request), None)
        core.engine_core.add_request(request)

    for index, parts in enumerate(sessions):
        for _ in range(1 if waits else len(parts) + 1):
            send(index)
    for index, prompt in enumerate(others[0]):
        core.add_request(f"other-{index}", prompt, others[1])
    while core.has_unfinished_requests():
        for output in core.step():
            kind, _, number = output.request_id.partition("-")
            index, out = int(number), output.outputs[0]
            if kind == "other":
                outputs |= {index: output} if output.finished else {}
                continue
            answers[index][-1] += out.token_ids
            if out.finish_reason is not None:
                answers[index].append([])
                if waits:
                    send(index)
    return [some[:-1] for some in answers], [outputs[i] for i in range(len(outputs))]


def session_texts(
    sessions: Sequence[Sequence[list[int]]], answers: Sequence[Sequence[list[int]]]
) -> list[Prompt]:
    """The texts that the parts of sessions were answered behind."""
    texts: list[Prompt] = []
    for parts, some in zip(sessions, answers, strict=True):
        text: list[int] = []
        for part, answer in zip(parts, some, strict=True):
            texts.append({"prompt_token_ids": [*text, *part]})
            text += part + answer[:-1]  # vLLM drops the last token of an answer
    return texts


@contextmanager
def preemptions(llm: Any) -> Iterator[list[str]]:
    """The requests that are preempted within the block."""
    preempted: list[str] = []
    scheduler = scheduler_of(llm)
    stock = scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return stock(request, *args, **kwargs)

    scheduler._preempt_request = note
    try:
        yield preempted
    finally:
        del scheduler._preempt_request


def step_to_the_end(llm: Any) -> None:
    """Let the worker hear of the last requests that ended."""
    for _ in range(3):
        if scheduler_of(llm).has_requests():
            llm.llm_engine.step()


def chi_square_p_value(left: Counter, right: Counter) -> float:
    """Pearson's test that two samples have one distribution; rare outcomes are pooled."""
    frequent = [key for key, count in (left + right).items() if count >= 10]
    cells = [[side[key] for key in frequent] for side in (left, right)]
    table = torch.tensor(
        [[*row, side.total() - sum(row)] for row, side in zip(cells, (left, right), strict=True)],
        dtype=torch.float64,
    )
    table = table[:, table.sum(dim=0) >= 10]
    expected = table.sum(dim=1, keepdim=True) * table.sum(dim=0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor(table.shape[1] - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
