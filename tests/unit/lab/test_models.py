"""Models and heads by name, and what a configuration says of their KV."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from vllm_trie.lab import local_engine, smollm2, tiny_model
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


def test_a_configuration_is_read_as_the_engine_reads_it(monkeypatch):
    read: dict[str, Any] = {}

    def text_config(model: str, **options: Any) -> Any:
        read.update(options)
        return SimpleNamespace(num_hidden_layers=1, num_attention_heads=1, hidden_size=8)

    monkeypatch.setattr(local_engine, "text_config", text_config)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **settings: settings))
    options = {"revision": "older", "trust_remote_code": True}
    settings: Any = local_engine.start_engine(
        "model", max_model_len=8, max_num_seqs=1, seed=1, **options
    )
    assert settings.items() > {**options, "seed": 1}.items()
    assert read == options
