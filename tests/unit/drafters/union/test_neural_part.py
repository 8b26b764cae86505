"""A trained drafter in a union: its chain as trunk, grafts below it, steps in which it rests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.support import make_context, make_request
from tests.unit.drafters.union.support import paths, trees
from vllm_trie.drafters import registry
from vllm_trie.drafters.neural import Chains
from vllm_trie.drafters.neural.drafter import chain_tree
from vllm_trie.drafters.union import TrieUnionDrafter, TrieUnionOptions
from vllm_trie.drafters.union.evaluation import HORIZON, evaluate
from vllm_trie.drafters.union.forward_gate import (
    EXPLORATION,
    FIRST_CALLS,
    FIRST_DRAFTS,
    MAX_REST,
    ForwardGate,
)
from vllm_trie.drafters.union.merge import Draft, Graft, best_chain, build_tree, merge
from vllm_trie.tree import TokenTree

PART = {"method": "eagle", "model": "some/head", "num_speculative_tokens": 3}


class Source:
    """Says 1, 2, 3 with 0 as the alternative, after any text."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def draft(self, request_ids: Sequence[str]) -> Chains:
        self.calls.append(len(request_ids))
        tokens = np.array([[[1, 0], [2, 0], [3, 0]]] * len(request_ids), dtype=np.int32)
        probabilities = np.array([[[0.8, 0.1]] * 3] * len(request_ids), dtype=np.float32)
        return Chains(tokens, probabilities)


def union_with(source: Source, num_nodes: int = 16, **options: Any) -> TrieUnionDrafter:
    settings = {"drafters": ["ngram_trie", PART], "adaptive": False, **options}
    parsed = registry.parse_options("trie_union", settings)
    assert isinstance(parsed, TrieUnionOptions)
    union = TrieUnionDrafter(parsed, make_context(num_nodes=num_nodes, vocab_size=40))
    assert union.neural is not None
    union.neural.source = source
    return union


def test_n_grams_go_on_after_every_token_of_the_chain() -> None:
    union = union_with(Source())
    # The text knows what follows 2 and 3, and nothing of the chain's beginning.
    [tree] = union.propose([make_request([2, 30, 9, 3, 31, 32, 9, 8], max_nodes=16)])
    drafted = {*paths(tree)}
    assert {(1, 2, 3), (0,), (1, 0)} <= drafted
    assert {(1, 2, 30), (1, 2, 3, 31), (1, 2, 3, 31, 32)} <= drafted


def test_a_chain_goes_on_with_n_grams_where_it_ends() -> None:
    union = union_with(Source())
    text = [2, 30, 9, 3, 31, 32, 9, 8]
    [tree] = union.propose([make_request(text, max_nodes=8, chain_only=True)])
    assert tree.is_chain
    assert tree.token_list[:5] == [1, 2, 3, 31, 32]


def test_the_limits_of_a_request_hold() -> None:
    tokens = np.array([[1, 0], [2, 0], [3, 0]], dtype=np.int32)
    rates = np.full((3, 2), 0.5, dtype=np.float32)
    assert chain_tree(make_request([5], max_nodes=2), tokens, rates).token_list == [1, 2]
    assert chain_tree(make_request([5], max_depth=1), tokens, rates).token_list == [1, 0]
    tree = chain_tree(make_request([5]), tokens, rates)
    tree.validate(40, 6)
    assert tree.probabilities is not None
    assert tree.probabilities.tolist() == [0.5, 0.25, 0.125, 0.5, 0.25, 0.125]
    none = np.full_like(tokens, -1)
    assert chain_tree(make_request([5]), none, rates).num_nodes == 0


@given(trees(), trees(), st.integers(1, 8))
def test_the_best_chain_promises_the_most_tokens(
    one: TokenTree, other: TokenTree, room: int
) -> None:
    merged = merge({0: one, 1: other})
    probabilities: list[float] = []
    for parent, edges in zip(merged.parents, merged.edges, strict=True):
        above = 1.0 if parent < 0 else probabilities[parent]
        probabilities.append(above * max(edges.values()))
    draft = Draft(merged, probabilities, {0: 0, 1: 0}, room, 5)
    chain = best_chain(draft)
    assert len(chain) <= room
    promised = []
    for node in range(merged.num_nodes):
        path = [node]
        while merged.parents[path[-1]] >= 0:
            path.append(merged.parents[path[-1]])
        promised.append(sum(probabilities[n] for n in path) if len(path) <= room else 0.0)
    assert sum(probabilities[n] for n in chain) == pytest.approx(max(promised, default=0.0))
    assert build_tree(draft, {0: one, 1: other}, chain_only=True).tree.is_chain


def test_grafts_do_not_outlive_the_chain_they_hang_on() -> None:
    """Without the chain, what another part drafted below it would not have been drafted."""
    chain = TokenTree.from_lists([1, 2], [-1, 0], [0.9, 0.8])
    ngram_tree = TokenTree.from_lists([7], [-1], [0.1])
    below = TokenTree.from_lists([5, 6], [-1, 0], [0.9, 0.9])
    merged = merge({0: ngram_tree, 1: chain}, [Graft(0, [1, 2], below)])
    assert merged.edges[-1].keys() == {0}
    draft = Draft(merged, [0.1, 0.9, 0.8, 0.7, 0.6], [0, 1], 8, 3)
    continuation = [1, 2, 5, 6, *[9] * (HORIZON - 4)]
    assert evaluate(draft, continuation) == {0: 2, 1: 4}


def _observed(call_seconds: float, **gains: float) -> ForwardGate:
    """A gate that knows steps of 10 ms with 1 token, and gains by what other trees promise."""
    gate = ForwardGate()
    for promised, gain in gains.items():
        for _ in range(FIRST_DRAFTS):
            assert gate.choose([float(promised[1:])]) == [0]
            gate.learn(float(promised[1:]), gain)
    gate.observe_call(1, call_seconds)
    gate.observe_step(1, 0.01)
    return gate


def test_passes_that_do_not_pay_are_forgone() -> None:
    gate = _observed(0.02, _6=0.1, _0=3.0)  # a pass is worth two tokens
    assert gate.choose([6.0]) == []
    assert gate.choose([0.0]) == [0]
    # Two requests share a call, whose time hardly depends on their number.
    for _ in range(MAX_REST):
        gate.observe_call(2, 0.02)
        gate.observe_call(1, 0.02)
    gate.learn(0.0, -16.0)
    assert gate.choose([0.0]) == []
    assert gate.choose([0.0, 0.0]) == [0, 1]


@pytest.mark.parametrize(("gain", "least", "most"), [(4, 380, 400), (3, 10, 40)])
def test_passes_are_made_where_they_raise_the_rate(gain: int, least: int, most: int) -> None:
    """Steps of 10 ms bring 4 tokens without passes of 8 ms: 0.4 in a millisecond. With them, a gain
    of 4 makes 0.44 of it and a gain of 3 makes 0.39."""
    gate = ForwardGate()
    num_made = 0
    for _ in range(400):
        made = bool(gate.choose([1.5]))
        num_made += made
        if made:
            gate.observe_call(1, 0.008)
            gate.learn(1.5, gain)
        gate.observe_step(4 + gain * made, 0.010 + 0.008 * made)
    assert least <= num_made <= most


def test_measuring_gains_takes_a_small_share_of_the_time() -> None:
    """Passes of 100 ms next to steps of 10 ms never pay, whatever the other parts promise."""
    gate = ForwardGate()
    num_made = 0
    for step in range(2000):
        promised = [0.1, 0.7, 1.5, 3.0, 6.0, 12.0][step % 6]
        made = bool(gate.choose([promised]))
        num_made += made
        if made:
            gate.observe_call(1, 0.1)
            gate.learn(promised, 1.0)
        gate.observe_step(4 + made, 0.01 + 0.1 * made)
    assert FIRST_CALLS < num_made < FIRST_CALLS + 1.2 * EXPLORATION * 2000 * 0.01 / 0.1


def test_passes_are_tried_again() -> None:
    gate = _observed(0.02, _6=0.0)
    made = [gate.choose([6.0, 6.0]) for _ in range(3 * (MAX_REST + 1))]
    assert [chosen for chosen in made if chosen] == [[0, 1]] * 3


def test_idle_time_does_not_count() -> None:
    gate = _observed(0.02, _6=0.1)
    before = vars(gate)["_seconds"]
    gate.observe_step(1, 60.0)
    assert vars(gate)["_seconds"] == before


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        (["eagle3"], "'eagle3' is a trained drafter and needs its checkpoint"),
        ([{"method": "ngram_trie"}], "'ngram_trie'.* allowed: draft_model, eagle, eagle3, mtp"),
        ([{"method": "eagle"}], "needs 'model'"),
        ([{**PART, "num_speculative_tokens": 99}], "less than or equal to 16"),
        ([{**PART, "tokens": 1}], "tokens"),
        ([PART, {**PART, "method": "eagle3"}], "name one of them"),
    ],
)
def test_wrong_entries_are_refused(drafters: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.parse_options("trie_union", {"drafters": drafters})
