"""The drafter that the documentation writes works as it says."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.docs.pages import page
from tests.unit.drafters.support import make_context, make_request
from vllm_trie.drafts import ENTRY_POINT_GROUP, Drafter, DraftRequest, parse_options, registry

PAGE = page("docs/drafters.md")


@pytest.fixture(scope="module")
def namespace():
    (code,) = [block for block in PAGE.fenced("python") if "class EchoDrafter" in block]
    names: dict[str, Any] = {"__name__": "echo"}
    exec(code, names)
    return names


def test_it_guesses_what_followed_before(namespace):
    drafter = namespace["EchoDrafter"](namespace["EchoOptions"](), make_context())
    (tree,) = drafter.propose([make_request([5, 6, 7, 5, 8, 5], max_nodes=8)])
    first = tree.token_ids[tree.parents == -1].tolist()
    assert first == [8, 6]  # the latest place first
    (chain,) = drafter.propose([make_request([5, 6, 7, 5, 8, 5], chain_only=True)])
    assert chain.is_chain
    assert chain.token_ids.tolist() == [8, 5]


TEXTS = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(TEXTS, st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_it_obeys_the_rules(namespace, tokens, max_nodes, max_depth, chain):
    drafter = namespace["EchoDrafter"](namespace["EchoOptions"](branches=3), make_context())
    request = make_request(tokens, max_nodes=max_nodes, max_depth=max_depth, chain_only=chain)
    (tree,) = drafter.propose([request])
    tree.validate(1000, max_nodes)
    assert tree.depths().max(initial=0) <= max_depth
    assert tree.is_chain or not chain


def test_the_entry_point_makes_it_a_method(namespace, monkeypatch):
    (toml,) = PAGE.fenced("toml")
    assert f'"{ENTRY_POINT_GROUP}"' in toml
    entry = re.search(r'^(\w+) = "([\w.]+):(\w+)"', toml, re.MULTILINE)
    assert entry[3] in namespace
    point = EntryPoint(entry[1], f"{entry[2]}:{entry[3]}", ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: namespace[entry[3]])
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    monkeypatch.setattr(registry, "_entry_points", registry._entry_points.__wrapped__)
    assert entry[1] in registry.available_methods()
    assert parse_options(entry[1], {"branches": 2}).branches == 2


def test_every_field_of_a_request_is_explained():
    for name in DraftRequest.__dataclass_fields__.keys() - {"request_id"}:
        assert f"`{name}`" in PAGE.text, name
    needs = (f"needs_{what}" for what in ("hidden_states", "node_argmax", "rows"))
    for name in ("load_model", "released", *needs):
        assert hasattr(Drafter, name)
        assert name in PAGE.text
