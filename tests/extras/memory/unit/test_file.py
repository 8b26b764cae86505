"""Store files that are damaged."""

from __future__ import annotations

import pytest

from tests.extras.memory.unit import test_store_file
from tests.unit.test_checked_file import Kind, made, test_every_changed_byte_is_noticed
from vllm_trie.extras.memory.store_file import FORMAT, read_store, write_store

__all__ = ["test_every_changed_byte_is_noticed"]


@pytest.fixture
def kind(tmp_path):
    def write(path: object) -> None:
        write_store(path, test_store_file.make_header(), test_store_file.TEXTS)

    return made(Kind(FORMAT, write, read_store), tmp_path)
