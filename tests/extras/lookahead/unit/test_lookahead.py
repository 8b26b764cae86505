from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.extras.lookahead.unit.reference import TwoBranchDecoder
from tests.unit.drafters.decoding import Decoding, toy_target
from tests.unit.drafters.support import end, make_context, make_request
from vllm_trie.drafts import VerifiedStep
from vllm_trie.extras.lookahead import LookaheadDrafter, LookaheadOptions
from vllm_trie.extras.lookahead.candidates import CandidateTrie
from vllm_trie.extras.lookahead.options import fit, window_nodes
from vllm_trie.extras.lookahead.pool import Candidate

VOCAB = 40


def _drafter(num_nodes: int = 64, **options: object) -> LookaheadDrafter:
    context = make_context(num_nodes=num_nodes, vocab_size=VOCAB)
    return LookaheadDrafter(LookaheadOptions.model_validate(options), context)


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
    st.integers(1, 10),
    st.integers(3, 6),
    st.integers(1, 3),
)
def test_decoding_is_the_two_branch_algorithm(prompt, window_size, ngram_size, order):
    """Step for step the output, the window and the pool of the paper's algorithm."""
    target = toy_target(VOCAB, order)
    drafter = _drafter(
        200,
        window_size=window_size,
        ngram_size=ngram_size,
        pool_from_text=False,
        min_probability=0.0,
    )
    decoding = Decoding(drafter, prompt, target)
    reference = None
    for _ in range(40):
        if reference is None:  # both begin with the same tokens
            decoding.step()
            first_level = decoding.tree.token_ids.tolist()
            reference = TwoBranchDecoder(
                target, decoding.tokens[: len(prompt) + 1], first_level, ngram_size, 5
            )
            assert reference.step() == decoding.tokens[len(prompt) + 1 :]
            continue
        assert decoding.step() == reference.step()
        never = decoding.tree.never_accept
        assert never is not None
    window_tokens = decoding.tree.token_ids[never].tolist()
    drafter.propose([make_request(decoding.tokens, last_step=decoding.last_step)])
    pool = drafter._states["a"].pool
    assert window_tokens
    assert {f: list(reversed(k)) for f, k in reference.pool.items()} == {
        first: [c.tokens for c in pool.after([first])] for first in reference.pool
    }
    assert drafter._states["a"].window.token_ids == [c.token for c in reference.cells()]


@given(st.data())
def test_any_schedule_gives_the_same_text(data):
    """Drafts that the scheduler cuts, limits that change, steps without a draft."""
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    decoding = Decoding(_drafter(32), prompt, toy_target(VOCAB))
    for _ in range(30):
        decoding.step_anyhow(data)
    decoding.check_text()


@pytest.mark.parametrize("lost", ["cut", "none", "unknown", "other"])
def test_a_window_that_was_not_verified_stays(lost):
    drafter = _drafter()
    decoding = Decoding(drafter, [1, 2, 3], toy_target(VOCAB))
    for _ in range(10):
        decoding.step()
    window = drafter._states["a"].window

    step = decoding.last_step
    unknown = np.where(np.arange(step.tree.num_nodes + 1) < 5, step.node_argmax, -1)
    decoding.last_step = {
        "cut": VerifiedStep(step.tree.prefix(20), step.accepted, step.node_argmax[:21]),
        "none": None,
        "unknown": step._replace(node_argmax=unknown),
        "other": step._replace(tree=replace(step.tree, token_ids=step.tree.token_ids + 1)),
    }[lost]
    before = window.token_ids
    decoding.step()
    assert window.token_ids == before
    decoding.step()
    assert window.token_ids != before


def test_the_window_survives_the_way_to_other_ranks():
    """A tree that was broadcast is an equal one, not the same object."""
    drafter = _drafter()
    decoding = Decoding(drafter, [1, 2, 3], toy_target(VOCAB))
    decoding.step()
    step = decoding.last_step
    copy = type(step.tree)(
        step.tree.token_ids.copy(), step.tree.parents.copy(), None, step.tree.never_accept
    )
    before = drafter._states["a"].window.num_nodes
    decoding.last_step = step._replace(tree=copy)
    decoding.step()
    assert drafter._states["a"].window.num_nodes > before


def test_another_text_begins_anew():
    target = toy_target(VOCAB)
    # All candidates, because it goes on knowing how often they were right.
    drafter = _drafter(min_probability=0.0)
    first = Decoding(drafter, [1, 2, 3], target)
    for _ in range(20):
        first.step()
    # The same id comes back with other tokens, as after an abort.
    again = Decoding(drafter, [3, 2, 1], target)
    again.last_step = first.last_step
    fresh = Decoding(_drafter(min_probability=0.0), [3, 2, 1], target)
    for _ in range(20):
        assert again.step() == fresh.step()
        assert sorted(again.tree.token_ids.tolist()) == sorted(fresh.tree.token_ids.tolist())


def test_structured_outputs_get_a_chain():
    drafter = _drafter()
    decoding = Decoding(drafter, [1, 2, 3], toy_target(VOCAB))
    for _ in range(20):
        decoding.step()
    longest = 0
    for _ in range(10):
        decoding.step(chain_only=True)
        assert decoding.tree.is_chain
        assert decoding.tree.never_accept is None
        longest = max(longest, decoding.tree.num_nodes)
    assert longest > 1


def test_pools_stay_bounded_over_many_requests():
    target = toy_target(VOCAB, 3)
    drafter = _drafter(pool_size=50)
    for start in range(60):
        running = [
            Decoding(drafter, [start % VOCAB, i, 7], target, f"{start}-{i}") for i in range(4)
        ]
        for _ in range(12):
            for decoding in running:
                decoding.step()
            assert all(state.pool.num_ngrams <= 50 for state in drafter._states.values())
        for decoding in running:
            end(drafter, decoding.request_id)
        end(drafter, "never seen")
    assert not drafter._states


def test_text_fills_the_pool():
    prompt = [1, 2, 3, 4, 5, 6, 1]
    [with_text] = _drafter().propose([make_request(prompt)])
    [without] = _drafter(pool_from_text=False).propose([make_request(prompt)])
    assert with_text.prefix(4).token_ids.tolist() == [2, 3, 4, 5]
    assert with_text.chain().num_nodes == 4
    assert without.chain().num_nodes == 0


@pytest.mark.parametrize("num_nodes", [7, 8, 16, 32, 48, 64, 256])
def test_defaults_fit_the_budget(num_nodes):
    shape = fit(LookaheadOptions(), num_nodes)
    assert window_nodes(shape.window_size, 5) + shape.max_candidate_nodes <= num_nodes
    assert shape.max_candidate_nodes >= num_nodes // 4 or shape.max_candidate_nodes >= 20
    if num_nodes >= 59:
        assert shape.window_size == 10
    smaller = fit(LookaheadOptions(), num_nodes + 1)
    assert smaller.window_size >= shape.window_size


@pytest.mark.parametrize(
    ("num_nodes", "options", "message"),
    [
        (32, {"window_size": 10}, "window_size=10 .*takes 39 nodes.*num_speculative_tokens=32.*40"),
        (4, {}, "num_speculative_tokens=4 is too small .*5-grams"),
    ],
)
def test_a_window_that_cannot_fit(num_nodes, options, message):
    with pytest.raises(ValueError, match=message) as error:
        _drafter(num_nodes, **options)
    needed = [n for n in range(1, 80) if _fits(n, options)]
    assert needed == list(range(needed[0], 80))
    assert str(needed[0]) in str(error.value)


def _fits(num_nodes: int, options: dict[str, object]) -> bool:
    try:
        fit(LookaheadOptions.model_validate(options), num_nodes)
    except ValueError:
        return False
    return True


def test_trees_put_the_newest_candidate_first():
    #          old: 1 -> 2 3 4 5          new: 1 -> 2 3 8 9
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3, 8, 9, 6, 6, 1]
    [tree] = _drafter(min_probability=0.0).propose([make_request(tokens)])
    assert tree.token_ids[:6].tolist() == [2, 3, 8, 9, 4, 5]
    # The context of the old one agrees.
    [tree] = _drafter(min_probability=0.0).propose([make_request([7, 7, 9, *tokens, 7, 7, 9, 1])])
    assert tree.token_ids[:6].tolist() == [2, 3, 4, 5, 8, 9]
    assert all(a >= b for a, b in pairwise(tree.probabilities[:4].tolist()))


def test_depth_and_node_limits_of_the_trie():
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3, 8, 9, 6, 6, 1]
    [shallow] = _drafter(max_candidate_depth=3, min_probability=0.0).propose([make_request(tokens)])
    assert shallow.chain().token_ids.tolist() == [2, 3, 8]
    [small] = _drafter(max_candidate_nodes=5, min_probability=0.0).propose([make_request(tokens)])
    assert (~small.never_accept).sum() == 5
    assert small.token_ids[:5].tolist() == [2, 3, 8, 9, 4]


CANDIDATES = st.lists(
    st.builds(Candidate, st.tuples(*[st.integers(0, 2)] * 3), st.integers(0, 3)),
    max_size=5,
    unique_by=lambda candidate: candidate.tokens,
)


@given(CANDIDATES, st.integers(0, 12), st.integers(1, 4))
def test_the_trie_holds_the_likeliest_prefixes(candidates, max_nodes, max_depth):
    full = CandidateTrie(candidates, max_depth).tree(100)
    tree = CandidateTrie(candidates, max_depth).tree(max_nodes)
    tree.validate(VOCAB, max_nodes)
    prefixes = {c.tokens[:n] for c in candidates for n in range(1, min(3, max_depth) + 1)}
    assert full.num_nodes == len(prefixes)
    assert tree.num_nodes == min(max_nodes, len(prefixes))
    drafted = {tuple(tree.token_ids[row].tolist()) for row in tree.ancestor_mask()}
    assert drafted <= prefixes
    if tree.num_nodes:
        best = sorted(full.probabilities.tolist(), reverse=True)[: tree.num_nodes]
        assert sorted(tree.probabilities.tolist(), reverse=True) == best


@given(CANDIDATES, st.integers(0, 12), st.floats(0.0, 1.0))
def test_unlikely_nodes_are_left_out(candidates, max_nodes, least):
    trie = CandidateTrie(candidates, 3)
    full, tree = trie.tree(max_nodes), trie.tree(max_nodes, least)
    tree.validate(VOCAB, max_nodes)
    expected = [] if full.probabilities is None else full.probabilities.tolist()
    probabilities = [] if tree.probabilities is None else tree.probabilities.tolist()
    # The tree's probabilities are rounded to 32 bits, the comparison is not.
    assert all(p >= least - 1e-6 for p in probabilities)
    assert len(probabilities) >= sum(p > least + 1e-6 for p in expected)
