"""What a configuration says of a model's KV."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_trie.lab.local_engine import kv_shape


@pytest.mark.parametrize(
    ("entries", "shape"),
    [({}, (4, 16)), ({"num_key_value_heads": 2}, (2, 16)), ({"head_dim": 8}, (4, 8))],
)
def test_absent_entries_of_a_configuration_follow_from_others(entries, shape):
    sizes = {"num_attention_heads": 4, "hidden_size": 64}
    assert kv_shape(SimpleNamespace(**sizes, **entries)) == shape
    empty = dict.fromkeys(("num_key_value_heads", "head_dim"))
    assert kv_shape(SimpleNamespace(**sizes, **empty | entries)) == shape
