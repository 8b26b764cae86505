"""Drafts from a read-only index."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles.ngrams.backend import PythonBackend
from tests.oracles.ngrams.index import NgramIndex
from vllm_trie.drafts.ngram_trie.drafter import BLEND
from vllm_trie.drafts.ngrams import Job, NativeBackend, NativeIndex
from vllm_trie.drafts.ngrams.native import NativeArchive

TEXT = np.array([*range(20), -1, 3, 4, 5, 9, 3, 4, 5, 9, -1], dtype=np.int32)


def archive(vocab_size: int = 26) -> NativeArchive:
    index = NativeIndex(8)
    index.add_text(TEXT)
    nodes, table = (np.frombuffer(array, dtype=np.uint8).copy() for array in index.arrays())
    return NativeArchive(nodes, table.view(np.int32), TEXT, 8, vocab_size)


def test_drafts_as_the_readable_twin_from_the_same_texts():
    """Of contexts of all lengths."""
    in_memory = NgramIndex(8)
    in_memory.add_text(TEXT)
    text = np.array([7, 3, 4, 9, *range(12), 3, 4, 5], dtype=np.int32)
    drafts = []
    for backend, source in (
        (NativeBackend(BLEND), archive()),
        (PythonBackend(BLEND), in_memory),
    ):
        index = backend.new_index(8)
        for length in (3, 6, 16, 19):
            tokens = text[:length].copy()
            job = Job(index, None, source, tokens, length, 16, 9, False)
            drafts.append(backend.draft_batch([job])[0].tree)
    assert drafts[0].token_ids.tolist()[:1] == [5]
    assert drafts[2].token_ids.tolist()[:7] == [12, 13, 14, 15, 16, 17, 18]
    for compiled, readable in zip(drafts[:4], drafts[4:], strict=True):
        for name in ("token_ids", "parents", "probabilities"):
            np.testing.assert_array_equal(getattr(compiled, name), getattr(readable, name))


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="do not form an n-gram index"):
        archive(vocab_size=19)
