"""Lookahead decoding in the engine: window nodes and candidates see what they may."""

from __future__ import annotations

import random

import numpy as np
from vllm import SamplingParams

from tests.engine.compare import differences, generate, speculation
from tests.engine.prompts import prompts
from vllm_trie.drafts.engine.verification import placement
from vllm_trie.lab.local_engine import verifier_of
from vllm_trie.tree import TokenTree

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
COUNT = 12
# Without the text's own n-grams every accepted token is the window's work.
WINDOW_ONLY = speculation("lookahead_trie", 64, pool_from_text=False)


def _wrong_window_nodes(engine) -> int:
    """Of 60 window nodes, those whose argmax is not plain vLLM's after the same tokens."""
    llm = engine(**WINDOW_ONLY, enable_prefix_caching=False)
    drafter = verifier_of(llm).guard.drafter
    stock, seen = drafter.propose, []

    def watch(requests):
        for request in requests:
            step = request.last_step
            if step is not None and step.tree.never_accept is not None:
                seen.append((request.token_ids[: -len(step.accepted) - 1].tolist(), step))
        return stock(requests)

    drafter.propose = watch
    try:
        generate(llm, prompts(6), GREEDY)
    finally:
        del drafter.propose
    rng = random.Random(0)
    texts, argmax = [], []
    # Steps that verified candidates too, so that there is something that must not be seen.
    mixed = [(text, step) for text, step in seen if not step.tree.never_accept[0]]
    for text, step in rng.sample(mixed, 30):
        tree = step.tree
        mask = tree.ancestor_mask()
        for node in rng.sample(np.flatnonzero(tree.never_accept).tolist(), 2):
            texts.append({"prompt_token_ids": [*text, *tree.token_ids[mask[node]].tolist()]})
            argmax.append(int(step.node_argmax[node + 1]))
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    plain = generate(engine(), texts, one)
    return sum(o.outputs[0].token_ids[0] != token for o, token in zip(plain, argmax, strict=True))


def _let_see(monkeypatch, rows_never_accepted: bool) -> None:
    """Let window nodes see all candidates, or candidates all window nodes."""
    stock = placement.place

    def place(trees: list[TokenTree], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places, words = stock(trees, rows)
        first = 0
        for tree in trees:  # of at most 64 nodes: one word for each
            last = first + tree.num_nodes
            if tree.never_accept is not None and not tree.never_accept.all():
                seeing = tree.never_accept == rows_never_accepted
                extra = sum(1 << int(node) for node in np.flatnonzero(~seeing))
                words[first:last][seeing] |= np.uint64(extra)
            first = last
        return places, words

    monkeypatch.setattr(placement, "place", place)


def test_window_nodes_see_their_column_and_level_0(engine):
    assert _wrong_window_nodes(engine) == 0


def test_window_nodes_that_see_candidates_are_noticed(engine, monkeypatch):
    _let_see(monkeypatch, rows_never_accepted=True)
    assert _wrong_window_nodes(engine) > 6


def test_candidates_that_see_the_window_are_noticed(engine, expected, monkeypatch):
    _let_see(monkeypatch, rows_never_accepted=False)
    llm = engine(**WINDOW_ONLY, enable_prefix_caching=False)
    assert len(differences(expected, generate(llm, prompts(COUNT), GREEDY))) > COUNT // 4
