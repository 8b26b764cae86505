"""Each part of tree verification, taken away, must make the exactness test fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.engine.compare import (
    differences,
    generate,
    register_test_drafters,
    speculation,
    tell_oracle,
)
from tests.engine.prompts import prompts
from vllm_trie.attention import tree_batch
from vllm_trie.vllm_hooks import compaction, runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)


@pytest.fixture(autouse=True)
def _test_drafters(monkeypatch):
    register_test_drafters(monkeypatch)


def _num_wrong(engine) -> int:
    some = prompts(12)
    expected = generate(engine(), some, GREEDY)
    tell_oracle(expected)
    # No prefix cache: what a broken run wrote must not be found by a later one.
    tree = engine(**speculation("test_oracle", 24), enable_prefix_caching=False)
    return len(differences(expected, generate(tree, some, GREEDY)))


def test_nothing_taken_away(engine):
    assert _num_wrong(engine) == 0


def test_without_compaction(engine, monkeypatch):
    monkeypatch.setattr(compaction, "compact", lambda *_: None)
    assert _num_wrong(engine) > 6


def test_with_flat_positions(engine, monkeypatch):
    stock = runner.TreeRunnerMixin._place_trees

    def place_trees_flat(self, *args):
        flat = self.positions.clone()
        stock(self, *args)
        self.positions.copy_(flat)

    monkeypatch.setattr(runner.TreeRunnerMixin, "_place_trees", place_trees_flat)
    assert _num_wrong(engine) > 6


def test_with_a_causal_mask(engine, monkeypatch):
    def causal(ancestor_words, num_queries):
        return np.tri(num_queries, dtype=bool)

    monkeypatch.setattr(tree_batch, "query_mask", causal)
    assert _num_wrong(engine) > 6


def test_with_blind_nodes(engine, monkeypatch):
    """Nodes that see the committed text and themselves, not their ancestors."""

    def blind(ancestor_words, num_queries):
        mask = np.eye(num_queries, dtype=bool)
        mask[:, : num_queries - len(ancestor_words)] = True
        return mask

    monkeypatch.setattr(tree_batch, "query_mask", blind)
    assert _num_wrong(engine) > 6


def test_keys_moved_without_values(engine, monkeypatch):
    def move_keys(kv_cache, source, target):
        values = tree_batch_values(kv_cache).clone()
        from vllm_trie.attention.cpu_cache import move_slots

        move_slots(kv_cache, source, target)
        tree_batch_values(kv_cache).copy_(values)

    def tree_batch_values(kv_cache) -> torch.Tensor:
        from vllm_trie.attention.cpu_cache import split_cache

        return split_cache(kv_cache)[1]

    monkeypatch.setattr(compaction, "move_slots", move_keys)
    assert _num_wrong(engine) > 6
