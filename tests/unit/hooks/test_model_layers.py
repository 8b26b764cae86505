"""Layers that would not see the trees, or not rightly, are refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_trie.drafts.engine.start.draft_support import check_layers

SHAPE: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.float32,
}


class Layer:
    def __init__(self, spec: Any, attends_to_trees: bool = True) -> None:
        self.impl = SimpleNamespace(attends_to_trees=attends_to_trees)
        self._spec = spec

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self._spec


FULL = FullAttentionSpec(**SHAPE)


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        None,
        ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64),
        # What vLLM makes of it where it keeps one kind of cache for all layers.
        FullAttentionSpec(**SHAPE, attention_chunk_size=64),
        SlidingWindowSpec(**SHAPE, sliding_window=64),
        FullAttentionSpec(**SHAPE, sliding_window=64),
    ],
    ids=repr,
)
def test_causal_attention_is_taken(spec):
    no_attention = SimpleNamespace()
    check_layers(None, {"a": Layer(FULL), "b": no_attention, "c": Layer(spec)})


def test_layers_of_a_trained_drafter_see_no_trees():
    layer: Any = Layer(FullAttentionSpec(**SHAPE, non_causal=True), attends_to_trees=False)
    layer.is_draft_layer = True
    check_layers(None, {"a": Layer(FULL), "of a drafter": layer})


@pytest.mark.parametrize(
    "spec",
    [FullAttentionSpec(**SHAPE, non_causal=True), MLAAttentionSpec(**SHAPE)],
    ids=repr,
)
def test_other_kinds_are_refused(spec):
    with pytest.raises(ValueError, match="needs causal attention") as caught:
        check_layers(None, {"full": Layer(FULL), "other": Layer(spec)})
    assert ": other (Layer);" in str(caught.value)


def test_backends_that_know_no_trees_are_refused():
    with pytest.raises(ValueError, match=r"two \(SimpleNamespace\)") as caught:
        check_layers(None, {"one": Layer(FULL), "two": Layer(FULL, attends_to_trees=False)})
    assert "attention_backend" in str(caught.value)
