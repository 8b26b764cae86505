"""Trained drafters in a union on Model Runner V2, against plain V2 and vLLM's own methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vllm import LLM
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from tests.engine.compare import (
    accepted_tokens,
    check_outputs_beside_aborts,
    differences,
    generate,
    preemptions,
)
from tests.engine.conftest import free_blocks
from tests.engine.neural_heads import RANDOM, make_draft_model
from tests.engine.v2_waits import Waits
from vllm_trie.drafts.ngrams import Candidates
from vllm_trie.lab.local_engine import runner_of, scheduler_of, verifier_of
from vllm_trie.lab.tiny_model import eagle_path

LENGTH = 3
MakeEngine = Callable[..., LLM]
Comparison = tuple[Any, Any, list[Any]]
"""Prompts, parameters, and plain outputs."""


NO_TEXT = {"options": {"ngram": {"index_tokens": 0, "store_tokens": 0, "recycle": False}}}
AS_TREES = {"verification": "tree"}


def union(entry: dict[str, Any], num_nodes: int, **options: Any) -> dict[str, Any]:
    """Engine options of a union with n-grams."""
    return {
        "speculative_config": {
            "method": "trie_union",
            "drafters": ["ngram", entry],
            "num_speculative_tokens": num_nodes,
            "node_budget": "fixed",  # the adaptive one goes by the time of steps
            **options,
        }
    }


def note_predictions(llm: LLM) -> tuple[dict[tuple[int, ...], np.ndarray], list[bool]]:
    """Return a dictionary that takes the probabilities of the drafter's likeliest tokens at each
    position after each text, and a list that takes whether vLLM drafts the likeliest of all, each
    after the one before."""
    heads: Any = verifier_of(llm).guard.drafter.heads
    seen, stock = dict[tuple[int, ...], np.ndarray](), heads.candidates
    agrees = list[bool]()

    def candidates(requests: Any) -> Any:
        predicted = stock(requests)
        flat = [of_all.reshape(len(requests), -1) for of_all in predicted[1:] if of_all is not None]
        for request, of_request in zip(requests, np.hstack(flat), strict=True):
            seen[tuple(request.token_ids.tolist())] = of_request
        rows = [heads._rows[request.request_id] for request in requests]
        chains = np.from_dlpack(runner_of(llm).speculator.draft_tokens)  # no wait that counts
        agrees.append(np.array_equal(likeliest_chains(predicted), chains[rows]))
        return predicted

    heads.candidates = candidates
    return seen, agrees


def likeliest_chains(predicted: Candidates) -> np.ndarray:
    """Return the likeliest token of each position, int32 [requests, K]."""
    tokens, probabilities, transitions = predicted
    best = probabilities.argmax(-1)
    if transitions is not None:
        requests = np.arange(len(best))
        for position in range(1, best.shape[1]):
            after = transitions[requests, position - 1, best[:, position - 1]]
            best[:, position] = after.argmax(-1)
    return np.take_along_axis(tokens, best[..., None], -1)[..., 0]


def largest_error(chains: dict[Any, np.ndarray], trees: dict[Any, np.ndarray]) -> float:
    """Return how far predictions after the same texts are apart."""
    common = chains.keys() & trees.keys()
    return max(float(np.abs(chains[text] - trees[text]).max()) for text in common)


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
    """Trees deeper than the drafter's, with n-grams: preemptions, prompts in parts, aborts."""
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
    result["failures"] = verifier_of(llm).totals.draft_failures
    result["blocks_lost"] = before - free_blocks(llm)
    return result


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
    model = make_draft_model(folder)
    entry = {"method": "draft_model", "model": model, "num_speculative_tokens": LENGTH}
    return run_union(engine(**union(entry, 4 * LENGTH, **AS_TREES)), requests, plain)


def compare_neural(engine: MakeEngine, cases: list[Comparison]) -> dict[str, Any]:
    """Compare vLLM's method with unions without text; see :func:`compare_trees`."""
    eagle = {"method": "eagle", "model": str(eagle_path()), "num_speculative_tokens": LENGTH}
    llm = engine(speculative_config=eagle)
    waits, accepted = Waits(llm), count_accepted(llm)
    result = {"differences": differing(llm, cases[:1])}
    result |= {"accepted": sum(accepted), "waits": waits.summary()}
    return {"alone": {"own": result, **compare_trees(engine, eagle, cases, **NO_TEXT)}}


def compare_random(
    engine: MakeEngine, cases: list[Comparison], folder: Path, *names: str
) -> dict[str, Any]:
    """Compare drafters with random weights, next to n-grams; see :func:`compare_trees`."""
    settings: dict[str, Any] = {"mtp": {"hf_overrides": {"num_nextn_predict_layers": 1}}}
    methods_of = {"dflash2": "dflash", "lilicorr": "dflash"}
    return {
        name: compare_trees(
            partial(engine, **settings.get(name, {})),
            {
                "method": methods_of.get(name, name),
                "model": RANDOM[name](folder / name),
                "num_speculative_tokens": LENGTH,
            },
            cases,
        )
        for name in names or RANDOM
    }


def compare_trees(
    engine: MakeEngine, entry: dict[str, Any], cases: list[Comparison], **options: Any
) -> dict[str, Any]:
    """Run a union as chains and as trees.

    Args:
        engine: Takes engine options.
        entry: The trained drafter.
        cases: Greedy ones first; trees run all.
        options: Of the union.

    Returns:
        For each what differs from plain outputs, whether predictions agree with vLLM's drafts, what
        is accepted in the first case, and how often steps wait for the device. For trees how far
        predictions are from those after chains, and how far if the step's tokens are left as trees
        have them.
    """
    engines = {
        "chains": engine(**union(entry, LENGTH, **options)),
        "trees": engine(**union(entry, 4 * LENGTH, **options, **AS_TREES)),
    }
    results, seen = dict[str, Any](), dict[str, Any]()
    for name, llm in engines.items():
        waits, accepted = Waits(llm), count_accepted(llm)
        seen[name], agrees = note_predictions(llm)
        results[name] = {"differences": differing(llm, cases[:1]), "agrees": all(agrees)}
        results[name] |= {"accepted": sum(accepted), "waits": waits.summary()}
    trees = results["trees"]
    trees["error"] = largest_error(**seen)
    trees["differences"] += differing(llm, cases[1:])
    seen["trees"].clear()
    runner_of(llm).adapter.flatten = lambda *_: None
    trees["differences"] += differing(llm, cases[:1])
    trees["unordered error"] = largest_error(**seen)
    return results


def differing(llm: LLM, cases: list[Comparison]) -> list[Any]:
    """Return the cases' outputs that differ from plain ones."""
    return [
        different
        for prompts, params, plain in cases
        for different in differences(plain, generate(llm, prompts, params))
    ]
