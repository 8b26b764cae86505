"""Accepted tokens per step of drafting methods on recorded answers, without a model.

The target model's answers are known, so a draft can be verified by comparing: each step drafts from
the prompt and the output so far, accepts the longest path of the tree that the recorded answer
follows, and gains one token more, as greedy decoding with that model would. The first output token
comes from the prefill. Tokens per step are the tokens after the first, EOS included, over the
steps. A category's figure pools its questions; the mean is over the categories.

    python benchmarks/replay.py --questions question.jsonl --answers vicuna-7b.jsonl \
        --method ngram_trie --method paper --nodes 32 --json replay.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from _replay_data import (
    ANSWERS_VARIABLE,
    DEFAULT_TOKENIZER,
    QUESTIONS_VARIABLE,
    Recording,
    load_tokenizer,
    read_recordings,
)
from _replay_methods import METHODS, Method
from _replay_variants import variants
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_trie.tree import TokenTree, accept_greedy


class Step(NamedTuple):
    """One verification."""

    num_tokens: int
    num_nodes: int
    draft_us: float
    expected_tokens: float | None
    """What the drafter's probabilities promise: one and the sum over the nodes."""


def replay(method: Method, request_id: str, recording: Recording) -> list[Step]:
    """Draft through one recorded answer."""
    num_prompt_tokens = len(recording.prompt)
    tokens = np.array(recording.prompt + recording.output, dtype=np.int32)
    steps = []
    position = num_prompt_tokens + 1
    while position < len(tokens):
        begin = time.perf_counter()
        tree = method.draft(request_id, tokens[:position], num_prompt_tokens)
        draft_us = 1e6 * (time.perf_counter() - begin)
        num_tokens = min(count_accepted(tree, tokens[position:]) + 1, len(tokens) - position)
        steps.append(Step(num_tokens, tree.num_nodes, draft_us, expected_tokens(tree)))
        position += num_tokens
    method.finish(request_id, tokens, num_prompt_tokens)
    return steps


def expected_tokens(tree: TokenTree) -> float | None:
    """Tokens that the step gains if the tree's probabilities are right."""
    if tree.probabilities is None:
        return None if tree.num_nodes else 1.0
    return 1.0 + float(tree.probabilities.sum())


def count_accepted(tree: TokenTree, continuation: np.ndarray) -> int:
    """Length of the longest path of the tree that `continuation` begins with."""
    after = [*continuation.tolist(), -1]
    last = len(after) - 1
    target = [after[0], *(after[min(depth, last)] for depth in tree.depths().tolist())]
    return len(accept_greedy(tree.token_ids.tolist(), tree.parents.tolist(), target))


def summarize(method: str, nodes: int, steps: dict[str, list[Step]]) -> list[dict]:
    """One row a category, and the mean over categories."""
    rows: list[dict] = []
    for category, found in sorted(steps.items()):
        rows.append(
            {
                "method": method,
                "category": category,
                "nodes": nodes,
                "tokens_per_step": sum(s.num_tokens for s in found) / max(len(found), 1),
                "nodes_per_step": sum(s.num_nodes for s in found) / max(len(found), 1),
                "draft_us": statistics.median(s.draft_us for s in found) if found else 0.0,
                "expected_tokens_per_step": _mean([s.expected_tokens for s in found]),
            }
        )
    keys = ("tokens_per_step", "nodes_per_step", "draft_us", "expected_tokens_per_step")
    mean = {key: _mean([row[key] for row in rows]) for key in keys}
    return [*rows, {"method": method, "category": "mean", "nodes": nodes, **mean}]


def _mean(values: list[float | None]) -> float | None:
    """None if a value is missing: the method does not say."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def print_table(rows: list[dict]) -> None:
    """A line for each method and number of nodes."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    table = Table("method", "nodes", *categories, "nodes/step", "draft µs")
    groups: defaultdict[tuple[str, int], dict[str, dict]] = defaultdict(dict)
    for row in rows:
        groups[row["method"], row["nodes"]][row["category"]] = row
    for (method, nodes), found in groups.items():
        figures = [f"{found[category]['tokens_per_step']:.3f}" for category in categories]
        mean = found["mean"]
        table.add_row(
            method,
            str(nodes),
            *figures,
            f"{mean['nodes_per_step']:.1f}",
            f"{mean['draft_us']:.0f}",
        )
    Console(width=160).print(table)


def main(
    questions: Annotated[
        Path,
        typer.Option(exists=True, envvar=QUESTIONS_VARIABLE, help="Spec-Bench's questions, JSONL."),
    ],
    answers: Annotated[
        Path, typer.Option(exists=True, envvar=ANSWERS_VARIABLE, help="A model's answers, JSONL.")
    ],
    tokenizer: Annotated[
        str, typer.Option(help="A SentencePiece file, or a Hugging Face tokenizer.")
    ] = DEFAULT_TOKENIZER,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(METHODS)} (default all), or a variant of _replay_variants.py."
        ),
    ] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Node limit of a draft.")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Where to write the rows.")
    ] = None,
) -> None:
    """Replay recorded answers."""
    methods = {**METHODS, **variants()}
    for name in method or ():
        if name not in methods:
            raise typer.BadParameter(f"--method {name}: allowed are {', '.join(methods)}")
    encoder = load_tokenizer(tokenizer)
    recordings = list(read_recordings(questions, answers, encoder))
    rows: list[dict] = []
    for num_nodes in nodes or [32]:
        for name in method or METHODS:
            drafter = methods[name](num_nodes, encoder.vocab_size)
            steps: defaultdict[str, list[Step]] = defaultdict(list)
            label = f"{name}, {num_nodes} nodes"
            for i, recording in enumerate(track(recordings, label, transient=True)):
                steps[recording.category].extend(replay(drafter, str(i), recording))
            rows.extend(summarize(name, num_nodes, steps))
    print_table(rows)
    if json_out is not None:
        json_out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
