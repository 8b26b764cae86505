"""Store files that are damaged."""

from __future__ import annotations

import pytest

from tests.extras.memory.unit import test_store_file
from tests.unit.test_checked_file import (
    Kind,
    made,
)
from tests.unit.test_checked_file import test_a_large_header_is_not_read as test_large_header
from tests.unit.test_checked_file import test_every_changed_byte_is_noticed as test_changed_bytes
from tests.unit.test_checked_file import test_every_truncation_is_noticed as test_truncations
from tests.unit.test_checked_file import test_missing_foreign_and_newer_files as test_other_files
from vllm_trie.extras.memory.store_file import FORMAT, read_store, write_store

__all__ = ["test_changed_bytes", "test_large_header", "test_other_files", "test_truncations"]


@pytest.fixture
def kind(tmp_path):
    def write(path: object) -> None:
        write_store(path, test_store_file.make_header(), test_store_file.TEXTS)

    return made(Kind(FORMAT, write, read_store), tmp_path)
