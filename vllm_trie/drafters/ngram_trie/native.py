"""The compiled n-gram index and drafter, and the Python types that stand for them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char, c_int64, c_void_p
from pathlib import Path

import numpy as np

from vllm_trie.drafters.ngram_trie.constants import OWN, SHARED
from vllm_trie.drafters.ngram_trie.interface import Job
from vllm_trie.native import NativeLibrary
from vllm_trie.tree import TokenTree

_FOLDER = Path(__file__).parent / "core"
_NONE = -1
NODE_BYTES = 32
"""Size of a node in memory and in a corpus file."""


_LIBRARY = NativeLibrary(
    "ngram_trie", "n-gram core", sorted(_FOLDER.glob("*.cpp")), sorted(_FOLDER.glob("*.hpp"))
)
is_available = _LIBRARY.is_available
require_library = _LIBRARY.require
_JOB = _LIBRARY.layout("DraftJob")
_BLEND = _LIBRARY.layout("Blend").pack(*OWN, *SHARED)


class NativeIndex:
    """An index of texts in native memory, freed with the object."""

    def __init__(self, max_order: int) -> None:
        self._library = require_library()
        self.handle = self._library.ngram_index_new(max_order)
        if not self.handle:
            raise MemoryError("no memory for an n-gram index")
        self.max_order = max_order

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.ngram_index_free(self.handle)

    @property
    def num_tokens(self) -> int:
        return int(self._library.ngram_index_num_tokens(self.handle))

    @property
    def num_nodes(self) -> int:
        return int(self._library.ngram_index_num_nodes(self.handle))

    @property
    def num_bytes(self) -> int:
        return int(self._library.ngram_index_num_bytes(self.handle))

    def add_text(self, token_ids: np.ndarray) -> int:
        """Add a text of int32 tokens (negative ones separate); returns its number."""
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        text = self._library.ngram_index_add(self.handle, tokens.ctypes.data, len(tokens))
        if text == _NONE:
            raise MemoryError("no memory for the n-grams of a text")
        return int(text)

    def remove_text(self, text: int) -> None:
        """Take a text out again."""
        if self._library.ngram_index_remove(self.handle, text) == _NONE:
            raise KeyError(f"the index holds no text {text}")

    def arrays(self) -> tuple[bytes, bytes]:
        """Copies of the node array and of the hash table."""
        nodes, table = c_void_p(), c_void_p()
        num_nodes, table_size = c_int64(), c_int64()
        self._library.ngram_index_arrays(
            self.handle,
            ctypes.byref(nodes),
            ctypes.byref(num_nodes),
            ctypes.byref(table),
            ctypes.byref(table_size),
        )
        return (
            ctypes.string_at(nodes.value or 0, num_nodes.value * NODE_BYTES),
            ctypes.string_at(table.value or 0, table_size.value * 4),
        )


class NativeCorpus:
    """A read-only index over arrays that live elsewhere, in a mapped file."""

    def __init__(
        self,
        nodes: np.ndarray,
        table: np.ndarray,
        tokens: np.ndarray,
        max_order: int,
        vocab_size: int,
    ) -> None:
        """`nodes` uint8 [n * NODE_BYTES], `table` int32 (its size a power of two), `tokens` int32.

        Raises:
            ValueError: the arrays are not those of an index.
        """
        self._library = require_library()
        self._arrays = (nodes, table, tokens)
        self.handle = self._library.ngram_corpus_open(
            nodes.ctypes.data,
            len(nodes) // NODE_BYTES,
            table.ctypes.data,
            len(table),
            tokens.ctypes.data,
            len(tokens),
            max_order,
            vocab_size,
        )
        if not self.handle:
            raise ValueError("the arrays do not form an n-gram index")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.ngram_corpus_close(self.handle)


def draft_batch(jobs: Sequence[Job]) -> list[tuple[TokenTree, int]]:
    """Draft for every job in one native call; updates the jobs' own indexes.

    Returns:
        For each job its tree, and the text of its store that matched (-1 if none did).
    """
    if not jobs:
        return []
    library = require_library()
    packed = b"".join([_packed(job) for job in jobs])
    rows = (c_char * len(packed)).from_buffer_copy(packed)
    stride = max(1, max(job.max_nodes for job in jobs))
    token_ids = np.empty((len(jobs), stride), dtype=np.int32)
    parents = np.empty((len(jobs), stride), dtype=np.int32)
    probabilities = np.empty((len(jobs), stride), dtype=np.float32)
    status = library.ngram_draft(
        ctypes.addressof(rows),
        len(jobs),
        _BLEND,
        stride,
        token_ids.ctypes.data,
        parents.ctypes.data,
        probabilities.ctypes.data,
    )
    if status == _NONE:
        raise MemoryError("no memory for the n-grams of a request")
    drafts = []
    for i, (*_, size, used_text) in enumerate(_JOB.iter_unpack(rows)):
        tree = TokenTree.empty()
        if size:
            tree = TokenTree(token_ids[i, :size], parents[i, :size], probabilities[i, :size])
        drafts.append((tree, used_text))
    return drafts


def _packed(job: Job) -> bytes:
    return _JOB.pack(
        job.own.handle,
        0 if job.store is None else job.store.handle,
        0 if job.corpus is None else job.corpus.handle,
        job.tokens.ctypes.data,
        len(job.tokens),
        job.num_indexed,
        job.min_probability,
        job.max_nodes,
        job.max_depth,
        job.chain_only,
        0,
        0,
    )
