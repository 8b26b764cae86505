"""Drafts from predictions: their place in the text, their counts, and beside a drafter's tree."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.extras.predictions.source import (
    PREDICTION,
    PredictionCounts,
    Predictions,
    merge_chain,
)
from vllm_trie.hooks.wire import TreeStats
from vllm_trie.tree import TokenTree

NODES = 16
PROMPT = [7, 8, 9]
WINDOW = replace(TokenTree.from_lists([3, 3], [-1, -1]), never_accept=np.ones(2, dtype=bool))
"""Of the drafter; it goes with no other nodes."""


def asking(name: str, text: list[int], packed: bytes) -> DraftRequest:
    tokens = np.array([*PROMPT, *text], dtype=np.int32)
    extra_args = {PREDICTION: packed}
    return DraftRequest(name, tokens, len(PROMPT), NODES, NODES, extra_args=extra_args)


def decode(
    predictions: Predictions, text: list[int], prediction: list[int], name: str = "a"
) -> tuple[int, int, int]:
    """Decode a text; return steps, accepted and rejected tokens."""
    done, steps, stats = 1, 1, TreeStats()  # the prefill samples the first token
    packed = np.array(prediction, dtype=np.int32).tobytes()
    while done < len(text):
        (tree,) = predictions.extend([asking(name, text[:done], packed)], [WINDOW])
        tree.validate(100, NODES)
        path = tree.path_of(text[done:])
        for _ in range(2):  # a draft counts in one step
            predictions.ended(TreeStep([name], [tree], accepted=[path]), [[]], stats)
        done += len(path) + 1
        steps += 1
    assert stats.of_requests.get(name, {}) == stats.counts
    return steps, *(stats.counts.get(of, 0) for of in PredictionCounts._fields)


@pytest.fixture
def source():
    """A text in which tokens and pairs of tokens repeat, as in code."""
    return np.random.default_rng(1).integers(10, 90, 400).tolist()


def test_a_right_prediction_takes_whole_runs(source):
    steps, accepted, rejected = decode(Predictions(), source, source)
    assert steps <= 2 + len(source) // (NODES + 1)
    assert len(source) - steps <= accepted <= len(source)
    assert rejected == 0


@pytest.mark.parametrize(
    ("kind", "most_steps"), [("replaced", 2), ("inserted", 7), ("removed", 3), ("renamed", 2)]
)
def test_the_place_is_found_again_after_a_difference(source, kind, most_steps):
    """`most_steps` are those that each of eight differences may cost."""
    text: list[int] = []
    for start in range(0, 400, 50):
        part = source[start : start + 50]
        new = {"replaced": [1], "inserted": [1, 2, 3, 4], "removed": [], "renamed": [1, 2]}[kind]
        old = {"replaced": 1, "inserted": 0, "removed": 6, "renamed": 1}[kind]
        text += part[:20] + new + part[20 + old :]
    steps, _, _ = decode(Predictions(), text, source)
    assert steps <= 2 + len(text) // (NODES + 1) + 8 * most_steps


def test_a_wrong_prediction_is_soon_drafted_no_more(source):
    text = np.random.default_rng(2).integers(10, 90, 400).tolist()
    _, accepted, rejected = decode(Predictions(), text, source)
    assert rejected < 0.5 * len(text)
    assert accepted < 20


def test_requests_share_nothing_and_are_forgotten(source):
    predictions = Predictions()
    alone = decode(predictions, source, source[::-1], "a")
    decode(predictions, source, source, "b")
    predictions.released("a")
    predictions.released("unknown")
    assert decode(predictions, source, source[::-1], "a") == alone


def test_a_text_that_starts_again_is_drafted_from_its_beginning(source):
    predictions = Predictions()
    first = decode(predictions, source, source)
    assert decode(predictions, source, source) == first


def test_merging_keeps_the_likeliest_nodes_of_both():
    # The drafter agrees on 1, and then says 5 where the chain says 2.
    drafted = TokenTree.from_lists([1, 5, 6, 4], [-1, 0, 1, -1], [0.6, 0.5, 0.4, 0.3])
    merged = merge_chain(drafted, [1, 2, 3], [0.9, 0.8, 0.7], max_nodes=6)
    merged.validate(100, 6)
    assert merged.token_list == [1, 2, 3, 5, 6, 4]
    assert merged.parent_list == [-1, 0, 1, 0, 3, -1]
    expected = 0.9 + 0.1 * 0.6  # the chain's claim, and the drafter's part of the rest
    assert merged.probabilities[0] == pytest.approx(expected)
    assert merged.probabilities[-1] == pytest.approx(0.1 * 0.3)
    assert merge_chain(drafted, [1, 2, 3], [0.9, 0.8, 0.7], max_nodes=2).token_list == [1, 2]


def test_the_step_is_short_however_the_prediction_repeats_itself():
    predictions = Predictions()
    for text in ([5] * 60, [1, 2] * 30):
        steps, _, _ = decode(predictions, text, [5] * 50_000 + [1, 2] * 25_000, str(text[:2]))
        assert steps < 20


def test_equal_places_cost_little_more_than_none():
    """Compare two alternating tokens, with breaks, to a prediction whose tokens all differ."""
    rng = np.random.default_rng(4)
    alternating = (np.arange(131_072) + (rng.random(131_072) < 0.001).cumsum()) % 2
    text = rng.integers(0, 2, 200)

    def seconds(prediction: np.ndarray) -> float:
        predictions = Predictions()
        packed = prediction.astype(np.int32).tobytes()
        steps = []
        for done in range(1, len(text)):
            request = asking("a", text[:done].tolist(), packed)
            start = time.thread_time()
            predictions.extend([request], [TokenTree.empty()])
            steps.append(time.thread_time() - start)
        return float(np.quantile(steps, 0.9))

    assert seconds(alternating) < 4.0 * seconds(rng.permutation(131_072))
