"""Store files that are damaged."""

from __future__ import annotations

import pytest

from tests.extras.memory.unit import test_store_file
from tests.unit.test_checked_file import (
    Kind,
    made,
    test_a_large_header_is_not_read,
    test_every_changed_byte_is_noticed,
    test_every_truncation_is_noticed,
    test_missing_foreign_and_newer_files,
)
from vllm_trie.extras.memory.store_file import FORMAT, read_store, write_store

__all__ = [
    "test_a_large_header_is_not_read",
    "test_every_changed_byte_is_noticed",
    "test_every_truncation_is_noticed",
    "test_missing_foreign_and_newer_files",
]


@pytest.fixture
def kind(tmp_path):
    def write(path: object) -> None:
        write_store(path, test_store_file.make_header(), test_store_file.TEXTS)

    return made(Kind(FORMAT, write, read_store), tmp_path)
