"""What holds for every tree of `ngram_trie`: limits, state, determinism."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.drafters.support import (
    VOCAB,
    by_path,
    end,
    make_context,
    make_drafter,
    make_request,
)
from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.ngram_trie import NgramTrieDrafter
from vllm_trie.drafts.ngrams import MAX_ORDER
from vllm_trie.tree import TokenTree, depth_first_layout

texts = st.lists(st.integers(0, 4), min_size=1, max_size=60)


class NoDrafts(NgramTrieDrafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [TokenTree.empty()] * len(requests)


def test_what_a_subclass_proposes_is_not_prepared_without_it():
    for drafter_class, prepares in ((NgramTrieDrafter, True), (NoDrafts, False)):
        drafter = drafter_class(NgramTrieDrafter.Options(), make_context())
        request = make_request([1, 2, 1])
        drafter.propose([request])
        assert (drafter.prepare([request], [0], 1) is not None) == prepares


EVENTS = st.tuples(
    st.sampled_from("abc"), st.sampled_from(["go on", "read ahead", "change", "end"]), texts
)


@given(
    st.lists(EVENTS, min_size=1, max_size=8),
    st.integers(1, 40),
    st.integers(1, 10),
    st.booleans(),
    st.integers(0, 60),
)
def test_drafts_are_those_of_a_fresh_drafter(events, max_nodes, max_depth, chain_only, prompt):
    """Requests go on, change and end in any order, each next to the others."""
    drafter, running = make_drafter(), dict[str, list[int]]()
    limits = {"max_nodes": max_nodes, "max_depth": max_depth, "chain_only": chain_only}

    def request_of(name: str, text: list[int]) -> DraftRequest:
        return make_request(text, name, min(prompt, len(text)), **limits)

    for name, event, tokens in events:
        if event == "end":
            end(drafter, name)
            running.pop(name, None)
            continue
        before = running.get(name, [])
        text = tokens if event == "change" else [*before, *tokens]
        # A text is known by its last tokens.
        size = len(before)
        assume(not size or event != "change" or before[-MAX_ORDER:] != text[:size][-MAX_ORDER:])
        running[name] = text
        if event == "read ahead":
            drafter.read_prompts([request_of(name, text)])
        requests = [request_of(*some) for some in running.items()]
        for request, tree in zip(requests, drafter.propose(requests), strict=True):
            tree.validate(VOCAB, max_nodes)
            assert tree.num_nodes == 0 or tree.probabilities is not None
            assert tree.depths().max(initial=0) <= max_depth
            assert tree.is_chain or not chain_only
            assert depth_first_layout(tree) is tree
            (fresh,) = make_drafter().propose([request])
            for array in ("token_ids", "parents", "probabilities"):
                np.testing.assert_array_equal(getattr(tree, array), getattr(fresh, array))


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
