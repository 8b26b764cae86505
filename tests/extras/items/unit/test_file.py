"""Catalogues that are damaged, or written to while they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.extras.items.unit import test_trie
from tests.extras.items.unit.catalogues import write
from tests.unit.test_checked_file import Kind, made, test_every_changed_byte_is_noticed
from tests.unit.test_files_in_use import (
    test_content_in_use_stays,
    test_what_is_opened_during_a_copy_is_whole,
)
from vllm_trie.extras.items import ItemsError, open_items
from vllm_trie.extras.items.trie_file import FORMAT

__all__ = [
    "test_content_in_use_stays",
    "test_every_changed_byte_is_noticed",
    "test_what_is_opened_during_a_copy_is_whole",
]


@pytest.fixture
def kind(tmp_path):
    return made(Kind(FORMAT, lambda path: write(path, test_trie.SMALL), open_items), tmp_path)


def open_catalogue(path: Path) -> Callable[[], Any]:
    trie = open_items(path)
    return lambda: (trie.num_items, trie.find_all([[7, 8]]).tolist(), int(trie.values.sum()))


@pytest.fixture
def opened(tmp_path):
    items = {(a, b): 10 * a + b for a in range(60) for b in range(40)}
    return write(tmp_path / "file", items), open_catalogue


def test_another_version_than_the_scheduler_has_is_refused(tmp_path):
    version = open_items(write(tmp_path / "file", test_trie.SMALL)).version
    open_items(tmp_path / "file", version=version)
    write(tmp_path / "file", {(1, 2): 3})
    with pytest.raises(ItemsError, match=f"not {version[:16]}"):
        open_items(tmp_path / "file", version=version)
