"""The n-gram-trie paper's method on recorded answers: accept lengths and the paper's settings.

Source: "Faster In-Context Learning for LLMs via N-Gram Trie Speculative Decoding", which reports
accept lengths of 2.39 for summaries and 5.19 for RAG. `accept_length` is the tokens that a
verification yields, as `tokens_per_step` in replay.py. `paper_static` looks up the prompt alone, as
the paper does; `paper` indexes the output too. A guess has at most n - L_p tokens behind a full
match, so steps that accept all of it yield n - L_p + 1.

    python benchmarks/ngram_paper.py --questions question.jsonl --answers vicuna-7b.jsonl

`--grid` varies n and L_p, `--nodes` the number of drafts.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from typing import NamedTuple

from replay import replay
from rich.progress import track
from support.harness import Row, option_parser, print_table, write_json
from support.paper_trie import PaperDrafter
from support.replay_data import (
    SMOKE_FILES,
    Recording,
    add_replay_options,
    load_tokenizer,
    recordings_of,
)
from support.replay_methods import OwnDrafter, Setting

GRID = list(itertools.product((6, 9, 13, 21), (1, 2, 3, 5)))
CATEGORIES = ("summarization", "rag", "qa")


class Settings(NamedTuple):
    """The paper's parameters, and whether the output is indexed."""

    ngram_size: int = 13
    max_prefix_len: int = 3
    nodes: int = 32
    index_output: bool = False


def accept_lengths(
    settings: Settings, recordings: list[Recording], vocab_size: int
) -> tuple[Counter[int], float]:
    """Return how many steps yielded how many tokens, and a draft's median duration in us."""
    method = OwnDrafter(
        PaperDrafter.name,
        Setting(settings.nodes, vocab_size),
        ngram_size=settings.ngram_size,
        max_prefix_len=settings.max_prefix_len,
        index_output=settings.index_output,
    )
    steps = [
        step
        for number, recording in enumerate(recordings)
        for step in replay(method, str(number), recording)
    ]
    return Counter(step.num_tokens for step in steps), statistics.median(s.draft_us for s in steps)


def row_of(settings: Settings, category: str, recordings: list[Recording], vocab_size: int) -> Row:
    """Measure one category with one setting."""
    lengths, draft_us = accept_lengths(settings, recordings, vocab_size)
    return {
        "method": "paper" if settings.index_output else "paper_static",
        "category": category,
        **settings._asdict(),
        "accept_length": sum(length * count for length, count in lengths.items()) / lengths.total(),
        "full_guesses": lengths[settings.ngram_size - settings.max_prefix_len + 1]
        / lengths.total(),
        "draft_us": draft_us,
        "histogram": [lengths[length] for length in range(1, settings.ngram_size + 1)],
    }


def print_rows(rows: list[Row]) -> None:
    """Print a line for each setting, then the histograms of the paper's own."""
    keys = ("method", "ngram_size", "max_prefix_len", "nodes")
    lines = {}
    for row in rows:
        line = lines.setdefault(tuple(row[key] for key in keys), {})
        line[row["category"]] = row["accept_length"]
    categories = list(dict.fromkeys(row["category"] for row in rows))
    print_table(
        (*keys, *categories),
        ((*setting, *(line.get(name) for name in categories)) for setting, line in lines.items()),
        "accept length",
    )
    first = [row for row in rows if row["nodes"] == 32 and row["ngram_size"] == 13]
    first = [row for row in first if row["max_prefix_len"] == 3]
    print_table(
        ("method", "category", *map(str, range(1, 14))),
        ((row["method"], row["category"], *row["histogram"]) for row in first),
        "steps by accept length",
    )


def main() -> None:
    """Replay recorded answers with the paper's method."""
    parser = option_parser(__doc__, smoke={**SMOKE_FILES, "categories": ["qa", "rag"]})
    add_replay_options(parser)
    parser.add_argument("--categories", nargs="+", default=CATEGORIES)
    parser.add_argument("--nodes", nargs="+", type=int, default=[32], help="numbers of drafts")
    parser.add_argument("--grid", action="store_true", help="vary n and L_p too")
    options = parser.parse_args()
    encoder = load_tokenizer(options.tokenizer)
    recordings = recordings_of(options, encoder)
    paper = Settings()
    settings = [
        paper._replace(nodes=number, index_output=index)
        for index in (False, True)
        for number in options.nodes
    ]
    if options.grid:
        settings += [paper._replace(ngram_size=n, max_prefix_len=prefix) for n, prefix in GRID]
    rows: list[Row] = []
    for setting in track(list(dict.fromkeys(settings)), transient=True):
        for name in options.categories:
            of_category = [recording for recording in recordings if recording.category == name]
            if not of_category:
                raise SystemExit(f"--categories {name}: no question has it")
            rows.append(row_of(setting, name, of_category, encoder.vocab_size))
        write_json(rows, options.json)
    print_rows(rows)


if __name__ == "__main__":
    main()
