"""A trained drafter in a union: its chain as trunk, grafts below it, steps in which it rests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.drafters.support import make_context, make_request
from tests.unit.drafters.union.support import trees
from tests.unit.tree.strategies import paths_of
from vllm_trie.drafts import registry
from vllm_trie.extras.union import TrieUnionDrafter, TrieUnionOptions
from vllm_trie.extras.union.merge import Draft, best_chain, build_tree, merge
from vllm_trie.extras.union.neural import Chains
from vllm_trie.extras.union.neural.drafter import chain_tree

PART = {"method": "eagle", "model": "some/head", "num_speculative_tokens": 3}


class Source:
    """Says 1, 2, 3 after any text."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def draft(self, request_ids: Sequence[str]) -> Chains:
        self.calls.append(len(request_ids))
        tokens = np.array([[1, 2, 3]] * len(request_ids), dtype=np.int32)
        probabilities = np.full((len(request_ids), 3), 0.8, dtype=np.float32)
        return Chains(tokens, probabilities)


def union_with(source: Source, num_nodes: int = 16, **options: Any) -> TrieUnionDrafter:
    settings = {"drafters": ["ngram_trie", PART], **options}
    parsed = registry.parse_options("trie_union", settings)
    assert isinstance(parsed, TrieUnionOptions)
    union = TrieUnionDrafter(parsed, make_context(num_nodes=num_nodes, vocab_size=40))
    union.neural.source = source
    return union


def test_n_grams_go_on_after_every_token_of_the_chain():
    union = union_with(Source())
    # The text knows what follows 2 and 3, and nothing of the chain's beginning.
    [tree] = union.propose([make_request([2, 30, 9, 3, 31, 32, 9, 8], max_nodes=16)])
    drafted = {*paths_of(tree)}
    assert (1, 2, 3) in drafted
    assert {(1, 2, 30), (1, 2, 3, 31), (1, 2, 3, 31, 32)} <= drafted


def test_a_chain_goes_on_with_n_grams_where_it_ends():
    union = union_with(Source())
    text = [2, 30, 9, 3, 31, 32, 9, 8]
    [tree] = union.propose([make_request(text, max_nodes=8, chain_only=True)])
    assert tree.is_chain
    assert tree.token_list[:5] == [1, 2, 3, 31, 32]


def test_the_limits_of_a_request_hold():
    tokens = np.array([1, 2, 3], dtype=np.int32)
    rates = np.full(3, 0.5, dtype=np.float32)
    assert chain_tree(make_request([5], max_nodes=2), tokens, rates).token_list == [1, 2]
    assert chain_tree(make_request([5], max_depth=1), tokens, rates).token_list == [1]
    tree = chain_tree(make_request([5]), tokens, rates)
    tree.validate(40, 3)
    assert tree.probabilities.tolist() == [0.5, 0.25, 0.125]


@given(trees(), trees(), st.integers(1, 8))
def test_the_best_chain_promises_the_most_tokens(one, other, room):
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
    assert build_tree(draft, chain_only=True).is_chain


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        (["eagle3"], "'eagle3' is a trained drafter and needs its checkpoint"),
        ([{"method": "ngram_trie"}], "'ngram_trie'.* allowed: draft_model, eagle, eagle3, mtp"),
        ([{"method": "eagle"}], "needs 'model'"),
        ([{**PART, "num_speculative_tokens": 99}], "less than or equal to 16"),
        ([{**PART, "tokens": 1}], "tokens"),
        ([{**PART, "num_alternatives": 2}], "num_alternatives=2 has no effect.*leave it out"),
        ([PART, {**PART, "method": "eagle3"}], "name one of them"),
    ],
)
def test_wrong_entries_are_refused(drafters, message):
    with pytest.raises(ValueError, match=message):
        registry.parse_options("trie_union", {"drafters": drafters})
