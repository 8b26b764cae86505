"""Catalogues in the scheduler: new versions, and what they cost."""

from __future__ import annotations

import os

from tests.extras.items.unit.catalogues import write
from vllm_trie.extras.items import Rules
from vllm_trie.extras.items import catalogues as module
from vllm_trie.extras.items.catalogues import Catalogues


def test_a_version_that_cannot_be_opened_is_tried_once(tmp_path, monkeypatch):
    path = write(tmp_path / "items", {(1, 2): 5})
    catalogues = Catalogues({"a": path}, vocab_size=9)
    first = catalogues.latest("a")
    calls = []

    def fail(*arguments: object) -> None:
        calls.append(arguments)
        raise OSError("the disk is gone")

    monkeypatch.setattr(module, "open_items", fail)
    os.utime(path, ns=(1, 1))
    for _ in range(5):
        assert catalogues.latest("a") is first
        catalogues._files["a"]._thread.join()
    assert len(calls) == 1


def test_equal_rules_are_looked_up_once(tmp_path, monkeypatch):
    catalogues = Catalogues({"a": write(tmp_path / "items", {(1, 2): 5, (3,): 6})}, vocab_size=9)
    monkeypatch.setattr(module, "MAX_SELECTIONS", 2)
    catalogue = catalogues.latest("a")

    def select(denied: int) -> object:
        return catalogues.select(catalogue, Rules(deny_items=[denied]))

    first = select(5)
    assert select(5) is first
    assert select(6) is not first
    select(7)  # there is room for two
    assert select(5) is not first
    assert catalogues.select(catalogue, Rules()) is None
