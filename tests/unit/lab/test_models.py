"""Models and heads by name, and what a configuration says of their KV."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import typer

from vllm_trie.lab import smollm2, tiny_model
from vllm_trie.lab.local_engine import kv_shape
from vllm_trie.lab.models import speculative_config


@pytest.mark.parametrize("method", ["medusa_dynamic", "trie_union"])
def test_heads_are_those_of_the_model(method, tmp_path):
    for model, heads in (
        (tiny_model.model_path(), tiny_model.medusa_path()),
        (tmp_path / smollm2.FOLDER_NAME, smollm2.medusa_path()),
    ):
        assert speculative_config(method, str(model), 8)["model"] == str(heads)
    with pytest.raises(typer.BadParameter, match="needs heads of the model"):
        speculative_config(method, "another", 8)


@pytest.mark.parametrize(
    ("entries", "shape"),
    [({}, (4, 16)), ({"num_key_value_heads": 2}, (2, 16)), ({"head_dim": 8}, (4, 8))],
)
def test_absent_entries_of_a_configuration_follow_from_others(entries, shape):
    sizes = {"num_attention_heads": 4, "hidden_size": 64}
    assert kv_shape(SimpleNamespace(**sizes, **entries)) == shape
    empty = dict.fromkeys(("num_key_value_heads", "head_dim"))
    assert kv_shape(SimpleNamespace(**sizes, **empty | entries)) == shape
