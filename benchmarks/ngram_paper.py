"""The n-gram-trie paper's method on recorded answers: accept lengths, settings, noise, ties.

Source: "Faster In-Context Learning for LLMs via N-Gram Trie Speculative Decoding", which reports
accept lengths of 2.39 for summaries and 5.19 for RAG. `accept_length` is the tokens of a
verification over all steps, as `tokens_per_step` in replay.py; `by_question` is the mean of the
questions' means. `truncated` counts the drafts that leave nodes out, `cut_in_tie` those of them
whose last node is as frequent as the first that was left out. `full_drafts` is the share of steps
that accept n - L_p tokens, the most there can be. `default` is `ngram_trie` without a store.

    python benchmarks/ngram_paper.py --questions question.jsonl --answers vicuna-7b.jsonl

`--grid` varies n and L_p, `--nodes` the number of drafts. `--noise` puts other questions' prompts
before each prompt, in multiples of its length; the answers stay as they were recorded. Speeds on a
real model, with the other columns of the paper's Table 1:

    python benchmarks/peers.py --workload chat --model smollm2 --questions question.jsonl \
        --categories summarization rag qa --methods plain lookahead medusa paper ngram_trie
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from replay import replay
from rich.progress import track
from support.harness import Row, option_parser, print_table, write_json
from support.paper_drafter import PaperDrafter
from support.replay_data import (
    SMOKE_FILES,
    Recording,
    add_replay_options,
    load_tokenizer,
    recordings_of,
)
from support.replay_methods import OwnDrafter, Setting

from vllm_trie.drafts import DraftRequest

GRID = list(itertools.product((6, 9, 13, 21), (1, 3, 5)))
CATEGORIES = ("summarization", "rag", "qa")


class Settings(NamedTuple):
    """The paper's parameters, and the noise before a prompt."""

    method: str = "paper"
    ngram_size: int = 13
    max_prefix_len: int = 3
    nodes: int = 32
    noise: float = 0.0


class CountingTies(OwnDrafter):
    """The paper's drafter, which counts where its drafts are cut off."""

    def __init__(self, settings: Settings, vocab_size: int) -> None:
        super().__init__(
            PaperDrafter.name,
            Setting(settings.nodes, vocab_size),
            ngram_size=settings.ngram_size,
            max_prefix_len=settings.max_prefix_len,
        )
        self.truncated = self.ties = 0

    def draft(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> Any:
        tree = super().draft(request_id, tokens, num_prompt_tokens)
        if tree.num_nodes == self._num_nodes:
            request = DraftRequest(
                request_id, tokens, num_prompt_tokens, self._num_nodes + 1, 1 << 20
            )
            [larger] = self.drafter.propose([request])
            self.truncated += larger.num_nodes > tree.num_nodes
            if larger.num_nodes > tree.num_nodes:
                self.ties += bool(np.sort(larger.probabilities)[:2].std() == 0)
        return tree


def with_noise(recordings: list[Recording], share: float) -> list[Recording]:
    """Return the recordings with other prompts before theirs, `share` times as long."""
    noisy = []
    for i, recording in enumerate(recordings):
        size = int(share * len(recording.prompt))
        others = itertools.chain.from_iterable(
            recordings[(i + k) % len(recordings)].prompt for k in range(1, len(recordings))
        )
        noise = list(itertools.islice(others, size))
        noisy.append(recording._replace(prompt=noise + recording.prompt))
    return noisy


def row_of(settings: Settings, category: str, recordings: list[Recording], vocab_size: int) -> Row:
    """Measure one category with one setting."""
    if settings.method == "paper":
        method: Any = CountingTies(settings, vocab_size)
    else:
        method = OwnDrafter("ngram_trie", Setting(settings.nodes, vocab_size), store_tokens=0)
    by_question = [
        replay(method, str(number), recording)
        for number, recording in enumerate(with_noise(recordings, settings.noise))
    ]
    steps = [step for question in by_question for step in question]
    lengths = Counter(step.num_tokens for step in steps)
    means = [statistics.fmean(s.num_tokens for s in steps) for steps in by_question if steps]
    deepest = settings.ngram_size - settings.max_prefix_len
    row = {
        "category": category,
        **settings._asdict(),
        "accept_length": statistics.fmean(step.num_tokens for step in steps),
        "by_question": statistics.fmean(means),
        "draft_us": statistics.median(step.draft_us for step in steps),
        "histogram": [lengths[length] for length in range(1, deepest + 2)],
    }
    if settings.method == "paper":
        row["full_drafts"] = lengths[deepest + 1] / len(steps)
        row |= {"truncated": method.truncated, "cut_in_tie": method.ties}
    return row


def print_rows(rows: list[Row]) -> None:
    """Print a line for each setting and category, then the histograms of the paper's own."""
    keys = ("method", "category", "ngram_size", "max_prefix_len", "nodes", "noise")
    figures = ("accept_length", "by_question", "full_drafts", "truncated", "cut_in_tie", "draft_us")
    print_table((*keys, *figures), ([row.get(key) for key in keys + figures] for row in rows))
    first = [row for row in rows if [row[key] for key in Settings._fields] == [*Settings()]]
    print_table(
        ("category", *map(str, range(1, 12))),
        ((row["category"], *row["histogram"]) for row in first),
        "steps by accept length",
    )


def main() -> None:
    """Replay recorded answers with the paper's method."""
    parser = option_parser(__doc__, smoke={**SMOKE_FILES, "categories": ["qa", "rag"]})
    add_replay_options(parser)
    parser.add_argument("--categories", nargs="+", default=CATEGORIES)
    parser.add_argument("--nodes", nargs="+", type=int, default=[32], help="numbers of drafts")
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0])
    parser.add_argument("--grid", action="store_true", help="vary n and L_p too")
    options = parser.parse_args()
    encoder = load_tokenizer(options.tokenizer)
    recordings = recordings_of(options, encoder)
    settings = [
        Settings(method=method, nodes=number, noise=noise)
        for number in options.nodes
        for noise in options.noise
        for method in ("paper", "default")
    ]
    if options.grid:
        settings += [Settings(ngram_size=n, max_prefix_len=prefix) for n, prefix in GRID]
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
