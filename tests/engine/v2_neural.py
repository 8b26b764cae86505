"""Trained drafters in a union on Model Runner V2, against plain V2 and vLLM's own methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from tests.engine.compare import (
    accepted_tokens,
    check_outputs_beside_aborts,
    differences,
    generate,
    preemptions,
)
from tests.engine.conftest import free_blocks, runner_of, scheduler_of, trees_of
from tests.engine.neural_heads import make_draft_model
from tests.engine.v2_waits import Waits
from vllm_trie.lab.tiny_model import eagle_path

LENGTH = 3
MakeEngine = Callable[..., LLM]


NO_TEXT = {"ngram": {"index_tokens": 0, "store_tokens": 0, "recycle": False}}


def union(entry: dict[str, Any], num_nodes: int, **options: Any) -> dict[str, Any]:
    """Engine options of a union with n-grams."""
    return {
        "speculative_config": {
            "method": "trie_union",
            "drafters": ["ngram", entry],
            "options": options,
            "num_speculative_tokens": num_nodes,
            "node_budget": "fixed",  # the adaptive one goes by the time of steps
        }
    }


def count_accepted(llm: LLM) -> list[int]:
    """Return a list that the tokens which a step accepts for a request are added to, without those
    behind the request's end.

    vLLM's metrics do not serve: in a process they are those of the engine that was made last.
    """
    core: Any = llm.llm_engine.engine_core
    accepted: list[int] = []
    stock = core.get_output

    def get_output() -> Any:
        result = stock()
        accepted.extend(
            len(output.new_token_ids) - 1 for output in result.outputs if output.new_token_ids
        )
        return result

    core.get_output = get_output
    return accepted


def steps_without_drafts(llm: LLM) -> list[bool]:
    """Return a list that each step adds to whether its scheduler wants no drafts, as vLLM 0.33's
    does after parts of prompts and before the last token."""
    scheduler, skipped = scheduler_of(llm), list[bool]()
    stock = scheduler.schedule

    def schedule(*args: Any) -> Any:
        output = stock(*args)
        skipped.append(getattr(output, "skip_drafts", False))
        return output

    scheduler.schedule = schedule
    return skipped


def run_union(llm: LLM, requests: tuple[Any, Any], plain: list[Any]) -> dict[str, Any]:
    """Chains longer than the drafter's, with n-grams: preemptions, prompts in parts, aborts."""
    before = free_blocks(llm)
    skipped = steps_without_drafts(llm)
    with preemptions(llm) as preempted:
        outputs = generate(llm, *requests)
    result: dict[str, Any] = {
        "async": type(scheduler_of(llm)).__name__.startswith("Async"),
        "own": isinstance(runner_of(llm).speculator, DraftModelSpeculator),
        "greedy": differences(plain, outputs),
        "preempted": len(preempted),
        "accepted": accepted_tokens(llm),
        "skipped": sum(skipped),
    }
    check_outputs_beside_aborts(llm, plain, requests[1], {3: [0]})
    result["failures"] = trees_of(llm).totals.draft_failures
    result["blocks_lost"] = before - free_blocks(llm)
    return result


def run_alone(
    engines: dict[str, LLM], requests: tuple[Any, Any], plain: list[Any]
) -> dict[str, Any]:
    """vLLM's method and a union without text: what differs from plain outputs, what is accepted,
    and how often steps wait for the device."""
    results: dict[str, Any] = {}
    for name, llm in engines.items():
        waits, accepted = Waits(llm), count_accepted(llm)
        outputs = generate(llm, *requests)
        results[name] = {"differences": differences(plain, outputs), "accepted": sum(accepted)}
        results[name]["waits"] = waits.summary()
    return results


def compare_union(
    engine: MakeEngine, requests: tuple[Any, Any], plain: list[Any], folder: Path
) -> dict[str, Any]:
    """Return what differs from plain outputs and what is accepted; see :func:`run_union`.

    Args:
        engine: Takes engine options.
        requests: Prompts and parameters.
        plain: Their outputs.
        folder: Takes a draft model.
    """
    model = make_draft_model(folder, num_layers=3)
    entry = {"method": "draft_model", "model": model, "num_speculative_tokens": LENGTH}
    return run_union(engine(**union(entry, 2 * LENGTH)), requests, plain)


def compare_neural(
    engine: MakeEngine, requests: tuple[Any, Any], plain: list[Any]
) -> dict[str, Any]:
    """Return what differs from plain outputs and what is accepted, alone."""
    eagle = {"method": "eagle", "model": str(eagle_path()), "num_speculative_tokens": LENGTH}
    engines = {
        "own": engine(speculative_config=eagle),
        "ours": engine(**union(eagle, LENGTH, **NO_TEXT)),
    }
    return {"alone": run_alone(engines, requests, plain)}
