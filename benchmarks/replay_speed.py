"""Speed of drafting methods on recorded answers, on a clock that a model of step costs drives.

replay.py counts tokens per step. Here the requests run together, a step takes the time that its
requests and tokens cost, and the adaptive budget of this project chooses nodes as in the engine: it
learns from the clock's durations, disturbed at random. So the result does not depend on the machine
or on other work on it. The time unit is a plain step of one request; with R requests and n tokens a
step takes ``1 + request_cost * (R - 1) + token_cost * (n - R)``, and drafting takes `drafting_cost`
for every method.

A speed is plain decoding's time per token over the method's. That of a category shares each step's
time equally among its requests. The next request begins when another has ended.

    python benchmarks/replay_speed.py --questions question.jsonl --answers vicuna-7b.jsonl \
        --at-once 1 8 --json speed.json
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
from rich.progress import track
from support.harness import Row, option_parser, print_table, write_json
from support.replay_data import (
    SMOKE_FILES,
    Recording,
    add_replay_options,
    load_tokenizer,
    recordings_of,
)
from support.replay_methods import Method as SingleMethod
from support.replay_methods import OwnDrafter, PromptLookup, Setting, SuffixDecoding

from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import DraftRequest
from vllm_trie.tree import TokenTree

NO_TREE = TokenTree.empty()


@dataclass(frozen=True)
class Costs:
    """Durations, in plain steps of one request."""

    token: float
    request: float
    drafting: float
    disturbance: float
    """Standard deviation of the logarithm of the durations that the budget is told."""

    def of_step(self, num_requests: int, num_nodes: int) -> float:
        """Return the duration of a step without drafting."""
        return 1.0 + self.request * (num_requests - 1) + self.token * num_nodes


class Text(NamedTuple):
    """A request as drafters see it."""

    request_id: str
    token_ids: np.ndarray
    """int32, prompt and output so far."""
    num_prompt_tokens: int


class Step(NamedTuple):
    """A step of a batch, verified."""

    batch: Sequence[Text]
    trees: Sequence[TokenTree]
    accepted: Sequence[Sequence[int]]
    """Accepted nodes of each tree."""
    seconds: float
    """Without drafting."""
    drafting_seconds: float

    @property
    def num_nodes(self) -> int:
        return sum(tree.num_nodes for tree in self.trees)


class Method:
    """Drafts for a batch; this one does not."""

    drafts = False

    def draft(self, batch: Sequence[Text]) -> list[TokenTree]:
        """Return a tree for each request."""
        return [NO_TREE] * len(batch)

    def observe(self, step: Step) -> None:
        """Take in a step: its accepted nodes and its duration."""

    def finish(self, text: Text) -> None:
        """Take note that a request has ended with this text."""


class Peer(Method):
    """A method without a budget, which drafts for one request at a time."""

    drafts = True

    def __init__(self, method: SingleMethod) -> None:
        self._method = method

    def draft(self, batch: Sequence[Text]) -> list[TokenTree]:
        return [self._method.draft(*text) for text in batch]

    def finish(self, text: Text) -> None:
        self._method.finish(*text)


class Budgeted(Method):
    """This project's `ngram_trie` with the adaptive budget.

    Args:
        num_nodes: node limit of a draft.
        vocab_size: of the model.
        chain_only: whether drafts are chains.
        costs: the budget begins with their curve, as it does after the engine's calibration.
    """

    drafts = True

    def __init__(self, num_nodes: int, vocab_size: int, chain_only: bool, costs: Costs) -> None:
        self._drafter = OwnDrafter("ngram_trie", Setting(num_nodes, vocab_size), chain_only).drafter
        self._num_nodes = num_nodes
        self._chain_only = chain_only
        self._budget = NodeBudget()
        for num_tokens in (1, 2, 5, 9, 17, 33, 65, 129, 257):
            self._budget.expect_step(num_tokens, costs.of_step(1, num_tokens - 1))

    def draft(self, batch: Sequence[Text]) -> list[TokenTree]:
        if not self._budget.should_draft(len(batch)):
            return super().draft(batch)
        request_ids = [text.request_id for text in batch]
        least = self._budget.least_probabilities(request_ids, len(batch))
        requests = [
            DraftRequest(
                *text, self._num_nodes, 1 << 20, self._chain_only, min_probability=probability
            )
            for text, probability in zip(batch, least, strict=True)
        ]
        return self._budget.cut(request_ids, self._drafter.propose(requests), len(batch))

    def observe(self, step: Step) -> None:
        num_rows = len(step.batch)
        if step.num_nodes:
            request_ids = [text.request_id for text in step.batch]
            self._budget.observe_verified(request_ids, step.trees, step.accepted)
        self._budget.observe_step(num_rows + step.num_nodes, step.seconds)
        self._budget.observe_drafting(step.drafting_seconds)

    def finish(self, text: Text) -> None:
        self._drafter.release(text.request_id)
        self._budget.release(text.request_id)


METHODS: dict[str, Callable[[int, Costs], Method]] = {
    "ngram": lambda vocab_size, costs: Peer(PromptLookup(8, min_length=1)),
    "suffix": lambda vocab_size, costs: Peer(SuffixDecoding(24)),
    "ngram_trie_chain": lambda vocab_size, costs: Budgeted(16, vocab_size, True, costs),
    "ngram_trie": lambda vocab_size, costs: Budgeted(32, vocab_size, False, costs),
}
"""Name -> constructor, from the size of the vocabulary and the costs; parameters as in peers.py."""


@dataclass
class Totals:
    """Sums over the steps of requests."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    nodes: int = 0

    def add(self, seconds: float, tokens: int, steps: int, nodes: int) -> None:
        """Add to all sums."""
        self.seconds += seconds
        self.tokens += tokens
        self.steps += steps
        self.nodes += nodes


def decode(
    method: Method,
    recordings: Sequence[Recording],
    at_once: int,
    max_tokens: int,
    costs: Costs,
    seed: int = 0,
) -> dict[str, Totals]:
    """Decode all recordings after their first token, `at_once` together.

    Returns:
        Totals by category.
    """
    noise = random.Random(seed)
    totals: defaultdict[str, Totals] = defaultdict(Totals)
    waiting = deque(enumerate(recordings))
    running: dict[int, int] = {}  # index of the recording -> tokens so far
    texts = [
        np.array(answered.prompt + answered.output[:max_tokens], dtype=np.int32)
        for answered in recordings
    ]

    def text_of(index: int) -> Text:
        num_prompt_tokens = len(recordings[index].prompt)
        end = running.get(index, len(texts[index]))
        return Text(str(index), texts[index][:end], num_prompt_tokens)

    while waiting or running:
        while waiting and len(running) < at_once:
            index, recording = waiting.popleft()
            running[index] = len(recording.prompt) + 1
        batch = [text_of(index) for index in running]
        trees = method.draft(batch)
        num_nodes = sum(tree.num_nodes for tree in trees)
        seconds, drafting = costs.of_step(len(batch), num_nodes), method.drafts * costs.drafting
        accepted = []
        for index, tree in zip(list(running), trees, strict=True):
            rest = texts[index][running[index] :].tolist()
            path = tree.path_of(rest)
            accepted.append(path)
            num_tokens = min(len(path) + 1, len(rest))
            share = (seconds + drafting) / len(batch)
            totals[recordings[index].category].add(share, num_tokens, 1, tree.num_nodes)
            running[index] += num_tokens
        disturbed = seconds * noise.lognormvariate(0.0, costs.disturbance)
        method.observe(Step(batch, trees, accepted, disturbed, drafting))
        for index in [i for i, size in running.items() if size >= len(texts[i])]:
            del running[index]
            method.finish(text_of(index))
    return totals


def rows_of(
    method: str, at_once: int, totals_of: dict[str, Totals], plain: dict[str, Totals]
) -> list[Row]:
    """Return a row for each category, one for their mean and one for all tokens."""
    rows: list[Row] = []
    every, every_plain = Totals(), Totals()
    for category, totals in sorted(totals_of.items()):
        rows.append(_row(method, at_once, category, totals, plain[category]))
        every.add(*astuple(totals))
        every_plain.add(*astuple(plain[category]))
    keys = ("speed", "tokens_per_step", "nodes_per_step")
    mean = {key: statistics.fmean(row[key] for row in rows) for key in keys}
    head = {"method": method, "at_once": at_once, "category": "mean"}
    return [*rows, {**head, **mean}, _row(method, at_once, "all", every, every_plain)]


def _row(method: str, at_once: int, category: str, totals: Totals, plain: Totals) -> Row:
    return {
        "method": method,
        "at_once": at_once,
        "category": category,
        "speed": plain.seconds / plain.tokens / (totals.seconds / totals.tokens),
        "tokens_per_step": totals.tokens / totals.steps,
        "nodes_per_step": totals.nodes / totals.steps,
    }


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line for each number of requests and method."""
    lines: defaultdict[tuple[int, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        lines[row["at_once"], row["method"]][row["category"]] = row
    categories = list(dict.fromkeys(row["category"] for row in rows))
    print_table(
        ("at once", "method", *categories, "tokens/step", "nodes/step"),
        [
            [
                *key,
                *(f"{by_category[category]['speed']:.3f}" for category in categories),
                *(by_category["all"]["tokens_per_step"], by_category["all"]["nodes_per_step"]),
            ]
            for key, by_category in lines.items()
        ],
    )


def main() -> None:
    """Decode recorded answers on a modelled clock."""
    smoke = {**SMOKE_FILES, "methods": ["ngram", "ngram_trie"], "at_once": [1, 2]}
    parser = option_parser(__doc__, smoke=smoke)
    add_replay_options(parser, METHODS)
    parser.add_argument(
        "--at-once", nargs="+", type=int, default=[1, 8, 32], help="requests that run together"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="longest output")
    for name, value, what in (
        ("--token-cost", 0.005, "of a draft token, in plain steps"),
        ("--request-cost", 0.02, "of a further request"),
        ("--drafting-cost", 0.005, "of drafting for a step"),
        ("--disturbance", 0.1, "relative noise of the durations that the budget sees"),
    ):
        parser.add_argument(name, type=float, default=value, help=what)
    options = parser.parse_args()
    encoder = load_tokenizer(options.tokenizer)
    recordings = [
        recording
        for recording in recordings_of(options, encoder)
        if min(len(recording.output), options.max_tokens) > 1
    ]
    random.Random(0).shuffle(recordings)
    costs = Costs(
        options.token_cost, options.request_cost, options.drafting_cost, options.disturbance
    )
    rows: list[Row] = []
    for together in options.at_once:
        work = recordings, together, options.max_tokens, costs
        plain = decode(Method(), *work)
        for name in track(options.methods or METHODS, f"{together} at once", transient=True):
            totals = decode(METHODS[name](encoder.vocab_size, costs), *work)
            rows += rows_of(name, together, totals, plain)
    print_rows(rows)
    write_json(rows, options.json)


if __name__ == "__main__":
    main()
