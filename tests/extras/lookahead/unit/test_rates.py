"""Acceptance rates that are learned while decoding."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.decoding import Decoding, toy_target
from tests.unit.drafters.support import end, make_context, make_request
from vllm_trie.extras.lookahead import LookaheadDrafter, LookaheadOptions
from vllm_trie.extras.lookahead.candidates import CandidateTrie
from vllm_trie.extras.lookahead.pool import Candidate
from vllm_trie.extras.lookahead.rates import Rate, Rates

VOCAB = 40
CANDIDATES = st.lists(
    st.builds(Candidate, st.tuples(*[st.integers(0, 2)] * 3), st.integers(0, 3)),
    max_size=5,
    unique_by=lambda candidate: candidate.tokens,
).map(lambda candidates: sorted(candidates, key=lambda candidate: -candidate.num_matched))


def _drafter(**options: object) -> LookaheadDrafter:
    context = make_context(num_nodes=64, vocab_size=VOCAB)
    return LookaheadDrafter(LookaheadOptions.model_validate(options), context)


@pytest.mark.parametrize("true_rate", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("expected", [0.05, 0.7])
def test_a_rate_becomes_what_is_seen(true_rate, expected):
    rng, rate = random.Random(1), Rate(expected)
    assert rate.probability == pytest.approx(expected)
    for _ in range(20_000):
        rate.count(rng.random() < true_rate)
    assert rate.probability == pytest.approx(true_rate, abs=0.06)


class _Counted:
    """Stands in for the rates: the same probability for all, and counts what it gets."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[object, ...]] = Counter()

    def of(self, *key: int) -> _Class:
        return _Class(self.seen, key)


class _Class:
    def __init__(self, seen: Counter[tuple[object, ...]], key: tuple[object, ...]) -> None:
        self.seen, self.key = seen, key

    probability = 0.5

    def count(self, was_right: bool) -> None:
        self.seen[*self.key, was_right] += 1


TEXT = st.lists(st.integers(0, 2), max_size=4)


@given(CANDIDATES, TEXT, st.integers(1, 3))
def test_what_is_counted(candidates, continuation, max_depth):
    """Against every distinct prefix on its own: those whose predecessors were right count, once,
    for the class of the best candidate that has them."""
    counted = _Counted()
    trie = CandidateTrie(candidates, max_depth, counted)
    trie.learn(continuation)
    expected: Counter[tuple[object, ...]] = Counter()
    prefixes: list[tuple[int, ...]] = []
    for candidate in candidates:
        for length in range(1, max_depth + 1):
            prefix = candidate.tokens[:length]
            if prefix in prefixes:
                continue
            rank = sum(len(p) == length and p[:-1] == prefix[:-1] for p in prefixes)
            prefixes.append(prefix)
            if list(prefix[:-1]) != continuation[: length - 1] or length > len(continuation):
                continue
            key = rank, candidate.num_matched, length - 1, candidates[0].num_matched
            expected[*key, prefix[-1] == continuation[length - 1]] += 1
    assert counted.seen == expected


def test_probabilities_become_those_of_a_simulated_text():
    """Drafting with full knowledge of the text: predicted and observed rates agree, far from the
    initial ones."""
    rng, rates = random.Random(3), Rates()
    predicted, observed, at_first = [0.0] * 3, [0] * 3, [0.0] * 3
    # Candidates for a text that follows the first in 20 % of all cases, the second in 60 %, and
    # goes on as they say in half of those.
    candidates = [Candidate((1, 2), 0), Candidate((3, 4), 0)]
    for trial in range(4000):
        trie = CandidateTrie(candidates, 2, rates)
        first = rng.choices([1, 3, 9], [0.2, 0.6, 0.2])[0]
        text = [first, first + 1 if rng.random() < 0.5 else 9]
        right = [text[0] == 1, text == [1, 2], text[0] == 3]
        if trial == 0:
            at_first = trie.probabilities[:3]
        if trial >= 1000:
            predicted = [p + q for p, q in zip(predicted, trie.probabilities, strict=False)]
            observed = [n + was for n, was in zip(observed, right, strict=True)]
        trie.learn(text)
    assert np.array(predicted) / 3000 == pytest.approx(np.array(observed) / 3000, abs=0.03)
    assert at_first[0] > 0.3 > 0.2 > at_first[2]


def test_candidates_are_judged_by_the_text_and_not_by_what_was_verified():
    """Whatever share of the tree is verified, the same text teaches the same."""
    target = toy_target(VOCAB)
    tokens = [1, 2, 3]
    while len(tokens) < 200:
        tokens.append(target(tokens))
    drafters = [_drafter(min_probability=0.0), _drafter(min_probability=1.0)]
    for size in range(4, 200):
        requests = [make_request(tokens[:size], num_prompt_tokens=3, max_nodes=64)]
        trees = [drafter.propose(requests)[0] for drafter in drafters]
    assert trees[0].num_nodes > trees[1].num_nodes
    assert _all_probabilities(drafters[0].rates) == _all_probabilities(drafters[1].rates)
    assert _all_probabilities(drafters[0].rates) != _all_probabilities(Rates())


def test_what_one_request_teaches_serves_the_next():
    """Deterministic on two drafters that are fed the same, and shared by their requests."""
    target = toy_target(VOCAB)
    left, right = _drafter(), _drafter()
    fresh_tree = None
    for request_id in ("a", "b", "c"):
        pair = [Decoding(drafter, [5, 6, 7], target, request_id) for drafter in (left, right)]
        for _ in range(40):
            for decoding in pair:
                decoding.step()
            trees = [decoding.tree for decoding in pair]
            assert np.array_equal(trees[0].token_ids, trees[1].token_ids)
            assert np.array_equal(trees[0].parents, trees[1].parents)
            assert np.array_equal(trees[0].probabilities, trees[1].probabilities)
        if fresh_tree is None:
            fresh_tree = trees[0]
        for drafter in (left, right):
            end(drafter, request_id)
    assert not np.array_equal(trees[0].probabilities, fresh_tree.probabilities)


def test_memory_does_not_grow():
    target = toy_target(VOCAB, 3)
    drafter = _drafter(pool_size=50)
    for start in range(12):
        decoding = Decoding(drafter, [start, 7, 8], target, str(start))
        for _ in range(30):
            decoding.step()
            assert len(drafter._states[str(start)].drafted) <= 4
        end(drafter, str(start))
    assert len(drafter.rates._rates) <= 5 * 4 * (4 + 3)


def _all_probabilities(rates: Rates) -> list[float]:
    ranges = range(5), range(4), range(4), range(4)
    return [rates.of(*key).probability for key in itertools.product(*ranges)]
