"""Accepted tokens per step of drafting methods on recorded answers, without a model.

The target model's answers are known, so a comparison verifies a draft. Each step drafts from the
prompt and the output so far, accepts the longest path of the tree that the recorded answer follows,
and gains one more token, as greedy decoding with that model would. The first output token comes
from the prefill. Tokens per step are the tokens after the first, EOS included, over the steps. A
category's figure pools its questions; the mean is over the categories.

    python benchmarks/replay.py --questions question.jsonl --answers vicuna-7b.jsonl \
        --method ngram_trie --method paper --nodes 32 --json replay.json
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track
from support.harness import Row, option_parser, print_table, write_json
from support.peers_engines import available
from support.replay_data import (
    SMOKE_FILES,
    Recording,
    add_replay_options,
    load_tokenizer,
    recordings_of,
    tokenizer_path,
)
from support.replay_methods import METHODS, Method, Setting

SMOKE_METHODS = ["ngram_trie", "paper", "vllm_ngram"]


class Step(NamedTuple):
    """One verification."""

    num_tokens: int
    num_nodes: int
    draft_us: float


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
        num_accepted = len(tree.path_of(tokens[position:].tolist()))
        num_tokens = min(num_accepted + 1, len(tokens) - position)
        steps.append(Step(num_tokens, tree.num_nodes, draft_us))
        position += num_tokens
    method.finish(request_id, tokens, num_prompt_tokens)
    return steps


def summarize(method: str, nodes: int, steps: dict[str, list[Step]]) -> list[Row]:
    """Return a row for each category, and one for the mean over the categories."""
    rows: list[Row] = []
    for category, replayed in sorted(steps.items()):
        rows.append(
            {
                "method": method,
                "category": category,
                "nodes": nodes,
                "tokens_per_step": sum(s.num_tokens for s in replayed) / max(len(replayed), 1),
                "nodes_per_step": sum(s.num_nodes for s in replayed) / max(len(replayed), 1),
                "draft_us": statistics.median(s.draft_us for s in replayed) if replayed else 0.0,
            }
        )
    keys = ("tokens_per_step", "nodes_per_step", "draft_us")
    mean = {key: statistics.fmean(row[key] for row in rows) for key in keys}
    return [*rows, {"method": method, "category": "mean", "nodes": nodes, **mean}]


def print_rows(rows: list[Row]) -> None:
    """Print a line for each method and number of nodes."""
    categories = list(dict.fromkeys(row["category"] for row in rows))
    groups: defaultdict[tuple[str, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        groups[row["method"], row["nodes"]][row["category"]] = row
    lines = [
        [
            *(method, nodes),
            *(f"{by_category[category]['tokens_per_step']:.3f}" for category in categories),
            *(by_category["mean"]["nodes_per_step"], by_category["mean"]["draft_us"]),
        ]
        for (method, nodes), by_category in groups.items()
    ]
    print_table(("method", "nodes", *categories, "nodes/step", "draft µs"), lines)


def main() -> None:
    """Replay recorded answers."""
    parser = option_parser(__doc__, smoke={**SMOKE_FILES, "nodes": [8], "methods": SMOKE_METHODS})
    add_replay_options(parser, METHODS)
    parser.add_argument("--nodes", nargs="+", type=int, default=[32], help="limit of a draft")
    parser.add_argument(
        "--times", type=int, default=1, help="ask all questions this often; the last time counts"
    )
    parser.add_argument("--corpus", type=Path, help="a corpus file for the own methods")
    options = parser.parse_args()
    encoder = load_tokenizer(options.tokenizer)
    recordings = recordings_of(options, encoder)
    methods = available([*(options.methods or METHODS)])
    rows: list[Row] = []
    for num_nodes in options.nodes:
        for name in methods:
            drafter = METHODS[name](
                Setting(
                    num_nodes,
                    encoder.vocab_size,
                    tokenizer_path(options.tokenizer),
                    None if options.corpus is None else str(options.corpus),
                )
            )
            label = f"{name}, {num_nodes} nodes"
            for turn in range(options.times):
                steps: defaultdict[str, list[Step]] = defaultdict(list)
                for i, recording in enumerate(track(recordings, label, transient=True)):
                    steps[recording.category].extend(replay(drafter, f"{turn}-{i}", recording))
            rows.extend(summarize(name, num_nodes, steps))
    print_rows(rows)
    write_json(rows, options.json)


if __name__ == "__main__":
    main()
