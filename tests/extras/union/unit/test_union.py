"""N-grams and heads in one tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.extras.heads.unit.support import HIDDEN, make_requests, random_heads
from tests.extras.heads.unit.support import VOCAB as OF_HEADS
from tests.unit.drafters.decoding import Decoding, toy_target
from tests.unit.drafters.support import by_path, end, make_context, make_drafter, make_request
from tests.unit.tree.strategies import paths_of
from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.ngrams import Candidates
from vllm_trie.drafts.registry import parse_options
from vllm_trie.extras.union import TrieUnionDrafter

VOCAB = 40
EAGLE = {"method": "eagle", "model": "some/head", "num_speculative_tokens": 3}
TEXT = [2, 30, 9, 3, 31, 32, 9, 8]
"""Knows what follows 2 and 3, and nothing of the chain's beginning."""


class Chain:
    """The chain 1, 2, 3 after any text."""

    def __init__(self, probability: float = 0.8) -> None:
        self.probability = probability

    def candidates(self, requests: Sequence[DraftRequest]) -> Candidates:
        tokens = np.array([[[1], [2], [3]]] * len(requests), dtype=np.int32)
        return Candidates(tokens, np.full(tokens.shape, self.probability, dtype=np.float32))


def make_union(heads: Any, **options: Any) -> TrieUnionDrafter:
    parsed = parse_options("trie_union", {"drafters": ["ngram", EAGLE], **options})
    union = TrieUnionDrafter(parsed, make_context(num_nodes=16, vocab_size=VOCAB))
    union.heads = heads
    return union


def test_heads_draft_where_the_text_is_new():
    [tree] = make_union(Chain()).propose([make_request([5, 6, 7], max_nodes=3)])
    assert by_path(tree) == pytest.approx({(1,): 0.8, (1, 2): 0.64, (1, 2, 3): 0.512}, rel=0.2)


def test_n_grams_go_on_after_every_token_of_the_heads():
    [tree] = make_union(Chain()).propose([make_request(TEXT, max_nodes=16)])
    drafted = {*paths_of(tree)}
    assert (1, 2, 3) in drafted
    assert {(1, 2, 30), (1, 2, 3, 31), (1, 2, 3, 31, 32)} <= drafted


def test_a_chain_goes_on_with_n_grams_where_the_heads_end():
    request = make_request(TEXT, max_nodes=8, chain_only=True)
    [tree] = make_union(Chain()).propose([request])
    assert tree.is_chain
    assert tree.token_list[:5] == [1, 2, 3, 31, 32]


def test_a_text_that_repeats_itself_comes_before_the_heads():
    [tree] = make_union(Chain()).propose([make_request([4, 5, 6, 7, 8] * 4, max_nodes=4)])
    assert paths_of(tree)[0] == (4,)


def test_a_candidates_children_are_as_likely_as_after_it():
    """And as in the chain after other tokens."""

    class Pairs:
        def candidates(self, requests: Sequence[DraftRequest]) -> Candidates:
            tokens = np.array([[[1, 2], [3, 4]]] * len(requests), dtype=np.int32)
            probabilities = np.array([[[0.5, 0.5], [0.3, 0.6]]] * len(requests), dtype=np.float32)
            transitions = np.array([[[[0.1, 0.9], [0.8, 0.2]]]] * len(requests), dtype=np.float32)
            return Candidates(tokens, probabilities, transitions)

    [tree] = make_union(Pairs()).propose([make_request([7, 30, 9, 7], max_nodes=24)])
    paths = by_path(tree)
    odds = {token: paths[token, 3] / paths[token, 4] for token in (1, 2, 30)}
    assert odds == pytest.approx({1: 1 / 9, 2: 4, 30: 1 / 2}, rel=0.25)


def test_heads_without_probability_leave_the_drafts_of_n_grams():
    requests = [make_request(TEXT * 3)]
    [alone] = make_drafter().propose(requests)
    [union] = make_union(None, drafters=["ngram"]).propose(requests)
    assert by_path(union) == by_path(alone)
    [of_both] = make_union(Chain(0.0)).propose(requests)
    assert {*paths_of(of_both)} <= {*paths_of(alone)}


@settings(max_examples=25)
@given(st.data())
def test_any_schedule_gives_the_same_text(data):
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    decoding = Decoding(make_union(Chain()), prompt, toy_target(VOCAB))
    for _ in range(25):
        decoding.step_anyhow(data)
    decoding.check_text()


def test_medusas_heads_draft_what_they_draft_alone():
    """And ended requests leave nothing behind."""
    context = make_context(vocab_size=OF_HEADS, hidden_size=HIDDEN, draft_model="heads")
    union = TrieUnionDrafter(parse_options("trie_union", {}), context)
    assert union.needs_hidden_states
    heads: Any = union.heads
    heads.set_heads(random_heads(), [1.0] * 3)
    requests = make_requests()
    for tree, request in zip(union.propose(requests), requests, strict=True):
        tree.validate(OF_HEADS, 24)
        [of_heads] = heads.propose([request])
        assert paths_of(of_heads)[0] in paths_of(tree)
        end(union, request)
    assert union._texts.num_tokens == 0


def test_the_options_of_parts_reach_them():
    options = {"ngram": {"store_tokens": 0}, "medusa": {"num_heads": 2, "joint": "context"}}
    parsed = parse_options("trie_union", {"options": options})
    assert not TrieUnionDrafter.keeps_texts(parsed)
    union = TrieUnionDrafter(parsed, make_context(draft_model="heads"))
    assert union.store is None
    heads: Any = union.heads
    assert (heads.options.num_heads, heads.options.joint) == (2, "product")


def test_the_files_of_parts_are_checked():
    with pytest.raises(ValueError, match="needs the Medusa heads"):
        TrieUnionDrafter.check_files(parse_options("trie_union", {}), VOCAB, None)
