"""What holds for every tree of `ngram_trie`: limits, state, determinism."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.drafters.support import VOCAB, by_path, end, make_drafter, make_request
from vllm_trie.drafts.ngrams import MAX_ORDER
from vllm_trie.tree import TokenTree, depth_first_layout

texts = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def same(a: TokenTree, b: TokenTree) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("token_ids", "parents", "probabilities")
    )


@given(texts, st.integers(1, 40), st.integers(1, 10), st.booleans(), st.integers(0, 60))
def test_trees_obey_the_limits(text, max_nodes, max_depth, chain_only, prompt):
    request = make_request(
        text,
        num_prompt_tokens=min(prompt, len(text)),
        max_nodes=max_nodes,
        max_depth=max_depth,
        chain_only=chain_only,
    )
    [tree] = make_drafter().propose([request])
    tree.validate(VOCAB, max_nodes)
    assert tree.num_nodes == 0 or tree.probabilities is not None
    assert tree.depths().max(initial=0) <= max_depth
    assert depth_first_layout(tree) is tree
    if chain_only:
        assert tree.is_chain


@given(texts, st.lists(st.integers(1, 6), max_size=6), st.integers(0, 10))
def test_growing_step_by_step_equals_starting_fresh(text, steps, prompt):
    prompt = min(prompt, len(text))
    drafter = make_drafter()
    length = max(prompt, 1)
    for step in [*steps, len(text)]:
        request = make_request(text[:length], num_prompt_tokens=prompt)
        [grown] = drafter.propose([request])
        [fresh] = make_drafter().propose([request])
        assert same(grown, fresh)
        length = min(length + step, len(text))


@given(st.lists(texts, min_size=1, max_size=4))
def test_batch_equals_requests_one_by_one(batch):
    requests = [make_request(text, request_id=str(i)) for i, text in enumerate(batch)]
    together = make_drafter().propose(requests)
    for request, tree in zip(requests, together, strict=True):
        assert same(make_drafter().propose([request])[0], tree)


@given(texts, texts, st.booleans())
def test_a_request_that_comes_back_changed_is_indexed_anew(before, after, released):
    # A text is known by its last tokens.
    assume(released or before[-MAX_ORDER:] != after[max(0, len(before) - MAX_ORDER) : len(before)])
    drafter = make_drafter()
    drafter.propose([make_request(before)])
    if released:
        end(drafter, "a")
        end(drafter, "a")
    request = make_request(after)
    [tree] = drafter.propose([request])
    [fresh] = make_drafter().propose([request])
    assert same(tree, fresh)


@given(texts, st.floats(0.01, 0.5))
def test_nodes_below_the_least_probability_are_left_out(text, least):
    [full] = make_drafter().propose([make_request(text, max_nodes=64)])
    [tree] = make_drafter().propose([make_request(text, max_nodes=64, min_probability=least)])
    pruned, complete = by_path(tree), by_path(full)
    assert all(p >= np.float32(least) for p in pruned.values())
    # Shares too small to matter are not counted, so a node may get a little less; so it may
    # be in a tree that has all the nodes it can have.
    if full.num_nodes < 64:
        assert all(p <= complete[path] + 1e-6 for path, p in pruned.items() if path in complete)
    likely = {path for path, p in complete.items() if len(path) == 1 and p >= 4 * least}
    assert likely <= pruned.keys()


@pytest.mark.parametrize("text", [[], [VOCAB - 1], [VOCAB - 1] * 50, list(range(VOCAB))])
@pytest.mark.parametrize("num_prompt_tokens", [0, 1])
def test_odd_texts(text, num_prompt_tokens):
    drafter = make_drafter()
    request = make_request(text, num_prompt_tokens=min(num_prompt_tokens, len(text)))
    for _ in range(2):
        [tree] = drafter.propose([request])
        tree.validate(VOCAB, 32)
        end(drafter, request)
    if len(text) == 50:
        assert tree.token_ids[0] == VOCAB - 1


_PRINT_TREES = """
import numpy as np
from tests.unit.drafters.support import end, make_drafter, make_request
drafter = make_drafter()
random = np.random.default_rng(3)
for i in range(4):
    text = random.integers(0, 9, 200).astype(np.int32)
    for size in (50, 60, 200):
        [tree] = drafter.propose([make_request(text[:size], str(i), 40, cache_salt="s")])
        print(tree.token_ids.tolist(), tree.parents.tolist(), tree.probabilities.tolist())
    end(drafter, make_request(text, str(i), 40, cache_salt="s"))
"""


def test_every_process_drafts_the_same_trees():
    printed = set()
    for seed in "12":
        result = subprocess.run(
            [sys.executable, "-c", _PRINT_TREES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(result.stdout)
    assert len(printed) == 1
    assert len(printed.pop().splitlines()) == 12


@given(texts, texts)
def test_a_prompt_that_is_read_ahead_is_indexed_as_by_a_draft(prompt, output):
    ahead, usual = make_drafter(), make_drafter()
    ahead.read_prompts([make_request(prompt)])
    usual.propose([make_request(prompt)])
    request = make_request([*prompt, *output])
    assert same(ahead.propose([request])[0], usual.propose([request])[0])
