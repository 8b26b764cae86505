"""The union as a whole: the requests that its parts get, the state that it keeps and drops."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafters.lookahead.driver import Decoding
from tests.unit.drafters.lookahead.reference import toy_target
from tests.unit.drafters.support import end, make_context, make_request
from tests.unit.drafters.union.support import VOCAB, Scripted, make_union
from vllm_trie.drafts import VerifiedStep
from vllm_trie.drafts.ngram_trie import NgramTrieDrafter
from vllm_trie.drafts.registry import parse_options
from vllm_trie.extras.union import TrieUnionDrafter, TrieUnionOptions
from vllm_trie.extras.union.drafter import HORIZON
from vllm_trie.tree import TokenTree


def _real_union(num_nodes: int = 48, **options: object) -> TrieUnionDrafter:
    """N-grams of the text, which learn from the argmax of nodes, and a token that is a guess."""
    context = make_context(num_nodes=num_nodes, vocab_size=VOCAB)
    guesses = Scripted(lambda request: TokenTree.from_paths([[3]], 1))
    ngrams = NgramTrieDrafter(NgramTrieDrafter.Options(), context)
    return TrieUnionDrafter(TrieUnionOptions.model_validate(options), context, [ngrams, guesses])


@settings(max_examples=25)
@given(st.data())
def test_any_schedule_gives_the_same_text(data):
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    union = _real_union()
    decoding = Decoding(union, prompt, toy_target(VOCAB))
    for _ in range(25):
        decoding.step_anyhow(data)
    decoding.check_text()


def test_parts_hear_of_the_unions_tree():
    parts = [Scripted(lambda request, t=t: TokenTree.from_lists([t], [-1])) for t in (1, 2)]
    union = make_union(parts)
    [tree] = union.propose([make_request([5, 6])])
    step = VerifiedStep(tree, (0,), None)
    union.propose(
        [make_request([5, 6, tree.token_list[0], 9], num_prompt_tokens=2, last_step=step)]
    )
    assert [part.last_requests["a"].last_step for part in parts] == [step, step]


def test_wrong_candidates_lose_their_room():
    """Calibration: of two parts that are sure of themselves the one that is wrong ends last."""
    wrong = Scripted(lambda request: TokenTree.from_lists([2], [-1], [0.9]))
    right = Scripted(lambda request: TokenTree.from_lists([1], [-1], [0.6]))
    union = make_union([wrong, right])
    for length in range(1, HORIZON + 200):
        [tree] = union.propose([make_request([1] * length, num_prompt_tokens=1)])
        if length == 1:
            assert tree.token_ids[0] == 2
    assert tree.token_ids[0] == 1
    [tree] = union.propose([make_request([1] * 300, num_prompt_tokens=1, max_nodes=1)])
    assert tree.token_ids.tolist() == [1]


def test_a_preempted_request_that_comes_back_shorter_begins_anew():
    target = toy_target(VOCAB)
    union = _real_union()
    decoding = Decoding(union, [1, 2, 3], target)
    for _ in range(15):
        decoding.step()
    state = union._states["a"]
    [tree] = union.propose([make_request(decoding.tokens[:5], num_prompt_tokens=3)])
    tree.validate(VOCAB, 32)
    assert union._states["a"] is not state
    again = Decoding(union, [1, 2, 3], target)
    for _ in range(15):
        again.step()
    again.check_text()


def test_a_preempted_request_that_comes_back_whole_goes_on():
    union = _real_union()
    decoding = Decoding(union, [1, 2, 3], toy_target(VOCAB))
    for _ in range(10):
        decoding.step()
    state = union._states["a"]
    decoding.last_step = None  # what was verified last is forgotten by the engine
    decoding.step()
    assert union._states["a"] is state


def test_release_reaches_all_parts_and_unknown_requests_are_fine():
    parts = [Scripted(lambda request: TokenTree.empty()) for _ in range(2)]
    union = make_union(parts)
    union.propose([make_request([1, 2])])
    end(union, "a")
    end(union, "a")
    end(union, "never seen")
    assert not union._states
    assert all(part.ended == ["a", "a", "never seen"] for part in parts)


def test_thousands_of_requests_leave_nothing_behind():
    """The union's states: bounded while requests run, gone afterwards."""
    rng = random.Random(0)
    guess = TokenTree.from_lists([3, 4], [-1, 0], [0.4, 0.2])
    scripted = Scripted(lambda request: guess, True)
    context = make_context(num_nodes=16, vocab_size=VOCAB)
    ngrams = NgramTrieDrafter(NgramTrieDrafter.Options(), context)
    union = make_union([ngrams, scripted], num_nodes=16)
    running: dict[str, tuple[list[int], VerifiedStep | None]] = {}
    most_drafts = 0
    for number in range(600):
        running[f"r{number}"] = ([rng.randrange(VOCAB) for _ in range(3)], None)
        if len(running) > 4:
            gone = rng.choice(list(running))
            del running[gone]
            end(union, gone)
        ids = rng.sample(list(running), min(2, len(running)))
        requests = [
            make_request(running[i][0], i, 3, max_nodes=16, last_step=running[i][1]) for i in ids
        ]
        for request_id, tree in zip(ids, union.propose(requests), strict=True):
            argmax = np.full(tree.num_nodes + 1, rng.randrange(VOCAB), dtype=np.int32)
            tokens = [*running[request_id][0], int(argmax[0])]
            running[request_id] = (tokens, VerifiedStep(tree, (), argmax))
        most_drafts = max(most_drafts, *(len(s.drafts) for s in union._states.values()))
        assert set(union._states) <= set(running)
    for request_id in running:
        end(union, request_id)
    assert 0 < most_drafts <= HORIZON
    assert not union._states
    # One small regression for each set of parts that proposes a node.
    assert len(union.calibrator._models) <= 6


def test_adaptive_is_refused():
    with pytest.raises(ValueError, match=r"adaptive=False has no effect.*leave it out"):
        parse_options("trie_union", {"adaptive": False})


def test_a_window_cannot_be_a_part():
    allowed = "'lookahead_trie' cannot be a part; allowed: medusa_dynamic, ngram_trie"
    with pytest.raises(ValueError, match=allowed):
        parse_options("trie_union", {"drafters": ["ngram", "lookahead_trie"]})
