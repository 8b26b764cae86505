"""Each part of tree verification, taken away, must make the exactness test fail."""

from __future__ import annotations

import numpy as np
import pytest
from vllm import SamplingParams

from tests.engine.compare import differences, generate, speculation
from tests.engine.prompts import prompts
from vllm_trie.attention import move_slots_in_layers, split_cache
from vllm_trie.drafts.engine import verifier
from vllm_trie.drafts.engine.verification import compaction, placement

pytestmark = pytest.mark.usefixtures("test_drafters")
COUNT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)


def _num_wrong(engine, expected) -> int:
    # No prefix cache: what a broken run wrote must not be found by a later one.
    tree = engine(**speculation("test_oracle", 24), enable_prefix_caching=False)
    return len(differences(expected, generate(tree, prompts(COUNT), GREEDY)))


def test_nothing_taken_away(engine, expected):
    assert _num_wrong(engine, expected) == 0


def test_without_compaction(engine, expected, monkeypatch):
    monkeypatch.setattr(compaction, "compact", lambda *_: None)
    assert _num_wrong(engine, expected) > 6


def test_with_flat_positions(engine, expected, monkeypatch):
    stock = verifier.place_trees

    def place_trees_flat(trees, tokens, takes_chains):
        flat = tokens.positions.clone()
        batch = stock(trees, tokens, takes_chains)
        tokens.positions.copy_(flat)
        return batch

    monkeypatch.setattr(verifier, "place_trees", place_trees_flat)
    assert _num_wrong(engine, expected) > 6


def _draw_trees_as(monkeypatch, ancestor_mask) -> None:
    """Let nodes see what `ancestor_mask`, a function of their number (at most 64), says."""
    stock = placement.TreeBatch

    def build(row_array, word_array, covers_batch):
        bits = 1 << np.arange(64, dtype=np.uint64)
        words = [
            (ancestor_mask(size) * bits[:size]).sum(axis=1, dtype=np.uint64)
            for size in row_array[:, 3].tolist()
        ]
        return stock(row_array, np.concatenate(words), covers_batch)

    monkeypatch.setattr(placement, "TreeBatch", build)


def test_with_a_causal_mask(engine, expected, monkeypatch):
    _draw_trees_as(monkeypatch, lambda num_nodes: np.tri(num_nodes, dtype=np.uint64))
    assert _num_wrong(engine, expected) > 6


def test_with_blind_nodes(engine, expected, monkeypatch):
    """Nodes that see the committed text and themselves, not their ancestors."""
    _draw_trees_as(monkeypatch, lambda num_nodes: np.eye(num_nodes, dtype=np.uint64))
    assert _num_wrong(engine, expected) > 6


def test_keys_moved_without_values(engine, expected, monkeypatch):
    def move_keys(kv_caches, source, target, isa):
        values = [split_cache(kv_cache)[1].clone() for kv_cache in kv_caches]
        move_slots_in_layers(kv_caches, source, target, isa)
        for kv_cache, before in zip(kv_caches, values, strict=True):
            split_cache(kv_cache)[1].copy_(before)

    monkeypatch.setattr(compaction, "move_slots_in_layers", move_keys)
    assert _num_wrong(engine, expected) > 6
