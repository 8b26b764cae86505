"""Catalogues in the scheduler: new versions, and what they cost."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from tests.extras.items.unit.catalogues import write
from vllm_trie.extras.items import catalogues as module
from vllm_trie.extras.items.build import build_items
from vllm_trie.extras.items.catalogues import Catalogues
from vllm_trie.extras.items.options import ItemOptions
from vllm_trie.extras.items.selection import Rules
from vllm_trie.extras.items.sources import read_items
from vllm_trie.extras.items.step import ItemStep
from vllm_trie.extras.items.trie_file import open_items
from vllm_trie.extras.items.worker import ItemSelection
from vllm_trie.files import watched_file
from vllm_trie.hooks.start.additional_config import CONFIG_KEY


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch):
    monkeypatch.setattr(watched_file, "INTERVAL", 0.0)


def test_a_version_of_another_tokenizer_is_refused(tmp_path, plugin_log):
    path = tmp_path / "items"
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"id": 5, "tokens": [1, 2]}')
    build_items(path, read_items(lines), "one")
    catalogues = Catalogues({"a": path}, vocab_size=9)
    first = catalogues.latest("a")
    build_items(path, read_items(lines), "another")
    catalogues.latest("a")
    catalogues._files["a"]._thread.join()
    assert catalogues.latest("a") is first
    assert "it was built with another tokenizer than the first version" in plugin_log.text


def test_requests_do_not_look_at_the_file_each(tmp_path, monkeypatch):
    """It may be on a network, and both processes look at it where they must not wait."""
    monkeypatch.setattr(watched_file, "INTERVAL", 1e9)
    path = write(tmp_path / "items", {(1, 2): 5})
    catalogues = Catalogues({"a": path}, vocab_size=9)
    config: Any = SimpleNamespace(
        additional_config={CONFIG_KEY: {"items": {"a": str(path)}}},
        model_config=SimpleNamespace(max_model_len=9),
    )
    looks = []
    stat = Path.stat

    def count(self: Path, **options: bool) -> os.stat_result:
        looks.append(self)
        return stat(self, **options)

    def request() -> None:
        catalogues.latest("a")
        ItemOptions(items="a").check_processed(config, SamplingParams(), 1)

    request()
    monkeypatch.setattr(Path, "stat", count)
    for _ in range(3):
        request()
    assert path not in looks


def test_workers_hold_two_versions(tmp_path):
    """A search of an older one goes on as long as the scheduler has it."""
    searches, kept = [], {}
    for item_id in range(3):
        trie = open_items(write(tmp_path / "items", {(1, 2): item_id}))
        place, nothing = (str(tmp_path / "items"), trie.memory, trie.version), np.zeros(0)
        search = ItemSelection(*place, "", "valid", None, ItemStep(nothing, nothing, 1))
        searches.append((search, trie))
    for search, trie in (*searches, *searches):
        assert search._trie(kept).values.tolist() == trie.values.tolist()
        (versions,) = kept.values()
        assert len(versions) <= 2
    elsewhere = search._replace(memory="/nowhere")  # on another host
    assert elsewhere._trie({}).version == trie.version


def test_equal_rules_are_looked_up_once(tmp_path, monkeypatch):
    catalogues = Catalogues({"a": write(tmp_path / "items", {(1, 2): 5, (3,): 6})}, vocab_size=9)
    monkeypatch.setattr(module, "MAX_VALID_PARTS", 2)
    catalogue = catalogues.latest("a")

    def select(denied: int) -> object:
        return catalogues.select(catalogue, Rules(deny_items=[denied]))

    first = select(5)
    assert select(5) is first
    assert select(6) is not first
    select(7)  # there is room for two
    assert select(5) is not first
    assert catalogues.select(catalogue, Rules()) is None


@pytest.mark.parametrize("rules", [Rules(deny_items=["x"]), Rules(["x"], deny_items=[5])])
def test_ids_of_another_type_than_the_served_version_has_are_no_unknown_ids(tmp_path, rules):
    """The newest file, against which the front end checks them, may have this type already."""
    catalogues = Catalogues({"a": write(tmp_path / "items", {(1, 2): 5})}, vocab_size=9)
    with pytest.raises(ValueError, match=r"item id 'x': .* has ids of type int"):
        catalogues.select(catalogues.latest("a"), rules)
    catalogues = Catalogues({"a": write(tmp_path / "items", {(1, 2): 5}, True)}, vocab_size=9)
    with pytest.raises(ValueError, match=r"item id 5: .* has ids of type str"):
        catalogues.select(catalogues.latest("a"), Rules(deny_items=[5]))
