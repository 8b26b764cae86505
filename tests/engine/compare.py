"""Plain vLLM against the same engine with trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import runner_of, scheduler_of
from tests.engine.drafters import DRAFTERS, OracleDrafter
from vllm_trie.drafters import registry

Prompt = dict[str, list[int]]


def register_test_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test drafters methods, as another package's entry points would."""
    for drafter in DRAFTERS:
        path = f"{drafter.__module__}:{drafter.__name__}"
        monkeypatch.setitem(registry._BUILT_IN, drafter.name, path)


def speculation(method: str, num_nodes: int, **options: Any) -> dict[str, Any]:
    """Engine options for a tree method; the budget is fixed, so that every node is verified."""
    settings = {"num_speculative_tokens": num_nodes, "node_budget": "fixed", **options}
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


def tell_oracle(outputs: Iterable[Any]) -> None:
    """Let the oracle drafter know the right answers."""
    for output in outputs:
        OracleDrafter.answers[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)


def differences(expected: Sequence[Any], found: Sequence[Any]) -> list[str]:
    """Where two lists of request outputs differ in tokens, text or reason to stop."""
    problems = []
    for index, (left, right) in enumerate(zip(expected, found, strict=True)):
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


def accepted_tokens(llm: Any) -> int:
    """Draft tokens that this engine has accepted so far: all output but one token a step."""
    totals = runner_of(llm).tree_totals
    return totals.tokens - totals.steps


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
