"""Corpora that are damaged, or written to while they are used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.extras.corpus.unit import test_corpus
from tests.unit.test_checked_file import Kind, made, test_every_changed_byte_is_noticed
from tests.unit.test_files_in_use import (
    test_content_in_use_stays,
    test_what_is_opened_during_a_copy_is_whole,
)
from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngrams import Job, NativeBackend
from vllm_trie.extras.corpus.corpus_file import FORMAT, open_corpus, write_corpus

__all__ = [
    "test_content_in_use_stays",
    "test_every_changed_byte_is_noticed",
    "test_what_is_opened_during_a_copy_is_whole",
]
TEXT = np.arange(20_000, dtype=np.int32) % 997


@pytest.fixture
def kind(tmp_path):
    def write(path: Path) -> None:
        write_corpus(path, test_corpus.DOCUMENTS, 26, "x")

    return made(Kind(FORMAT, write, open_corpus), tmp_path)


def open_drafts(path: Path) -> Callable[[], Any]:
    backend, corpus = NativeBackend(BLEND), open_corpus(path)

    def draft() -> Any:
        tokens = TEXT[100:110].copy()
        job = Job(backend.new_index(8), None, corpus, tokens, len(tokens), 16, 9, False)
        return backend.draft_batch([job])[0].tree.token_ids.tolist()

    return draft


@pytest.fixture
def opened(tmp_path):
    write_corpus(tmp_path / "file", [TEXT], 1000, "tokenizer")
    return tmp_path / "file", open_drafts
