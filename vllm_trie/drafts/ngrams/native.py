"""The compiled n-gram index and drafting, and the Python types that stand for them."""

from __future__ import annotations

import ctypes
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int64
from pathlib import Path
from typing import Any

import numpy as np

from vllm_trie.drafts.ngrams.blend import Blend
from vllm_trie.drafts.ngrams.job import Candidates, Draft, Job
from vllm_trie.native import NativeLibrary
from vllm_trie.tree import TokenTree

CORE = Path(__file__).parent / "core"
NODE_BYTES = 32
"""Size of a node in memory and in the file of an archive."""
ROW_TOKENS = 8
"""Likeliest tokens of a row of logits that are kept."""
MAX_ORDER = 8
"""Longest context that is looked up by default, in tokens."""
_NONE = -1
_ALL = 1 << 31
LIBRARY = NativeLibrary("ngrams", sorted(CORE.glob("*.cpp")), sorted(CORE.glob("*.hpp")))
_PACK_BATCH = LIBRARY.layout("DraftBatch").pack
_PACK_BLEND = LIBRARY.layout("Blend").pack
_PACK_JOB = LIBRARY.layout("DraftJob").pack
_PACK_STEP = LIBRARY.layout("NewTokens").pack
_NO_STEP = _PACK_STEP(0, 0, 0)


def _free_with(owner: Any, free: Callable[[int], None]) -> None:
    """Free an object's native memory with it, and not at the end of the process: somebody may still
    use it."""
    weakref.finalize(owner, free, owner.handle).atexit = False


class NativeIndex:
    """An index of texts in native memory, freed with the object."""

    def __init__(self, max_order: int) -> None:
        self._library = LIBRARY.functions
        self.handle = self._library.ngram_index_new(max_order)
        if not self.handle:
            raise MemoryError("no memory for an n-gram index")
        _free_with(self, self._library.ngram_index_free)

    @property
    def num_tokens(self) -> int:
        return int(self._library.ngram_index_num_tokens(self.handle))

    @property
    def num_nodes(self) -> int:
        return int(self._library.ngram_index_num_nodes(self.handle))

    def add_text(self, token_ids: np.ndarray, text: int | None = None) -> int:
        """Add a text of int32 tokens (negative ones separate), or append them to one; return its
        number."""
        tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
        number = self._library.ngram_index_add(
            self.handle, _NONE if text is None else text, tokens.ctypes.data, len(tokens)
        )
        if number == _NONE:
            raise MemoryError("no memory for the n-grams of a text")
        return int(number)

    def begin_branch(self, context: np.ndarray) -> int:
        """Begin a text that continues text 0, which ends with int32 [at most `max_order`] tokens.

        Its n-grams may begin there, and count from the next token on. Returns its number.
        """
        tokens = np.ascontiguousarray(context, dtype=np.int32)
        text = self._library.ngram_index_branch(self.handle, tokens.ctypes.data, len(tokens))
        if text == _NONE:
            raise MemoryError("no memory for the n-grams of a text")
        return int(text)

    def remove_text(self, text: int, num_tokens: int = _ALL) -> None:
        """Take a text out again, or its last tokens, to which none is added any more. No branch may
        continue it."""
        if self._library.ngram_index_remove(self.handle, text, num_tokens) == _NONE:
            raise KeyError(f"the index holds no text {text}")

    def arrays(self) -> tuple[bytes, bytes]:
        """Return copies of the node array and of the hash table."""
        described = (c_int64 * 4)()
        self._library.ngram_index_arrays(self.handle, described)
        nodes, num_nodes, table, table_size = described
        return (
            ctypes.string_at(nodes, num_nodes * NODE_BYTES),
            ctypes.string_at(table, table_size * 4),
        )


class NativeArchive:
    """A read-only index over arrays that live elsewhere, in the copy of a file."""

    def __init__(
        self,
        nodes: np.ndarray,
        table: np.ndarray,
        tokens: np.ndarray,
        max_order: int,
        vocab_size: int,
    ) -> None:
        """Open an index.

        Args:
            nodes: uint8 [n * NODE_BYTES].
            table: int32, its size a power of two.
            tokens: int32.

        Raises:
            ValueError: The arrays are not those of an index.
        """
        self._library = LIBRARY.functions
        self._arrays = (nodes, table, tokens)
        self.handle = self._library.ngram_archive_open(
            *(nodes.ctypes.data, len(nodes) // NODE_BYTES),
            *(table.ctypes.data, len(table)),
            *(tokens.ctypes.data, len(tokens)),
            *(max_order, vocab_size),
        )
        if not self.handle:
            raise ValueError("the arrays do not form an n-gram index")
        _free_with(self, self._library.ngram_archive_close)


class NativeRecycled:
    """A table of what a model held likely, in native memory, freed with the object.

    Args:
        max_contexts: Its room, CONTEXT_BYTES each and not less than `max_scopes`.
        max_scopes: Scopes are in [0, max_scopes).
    """

    def __init__(self, max_contexts: int, max_scopes: int) -> None:
        self._library = LIBRARY.functions
        self.handle = self._library.recycled_new(max_contexts, max_scopes, os.urandom(16))
        if not self.handle:
            raise MemoryError(f"no memory for {max_contexts} recycled contexts")
        _free_with(self, self._library.recycled_free)

    def forget(self, scope: int) -> None:
        """Remove the contexts of a scope."""
        self._library.recycled_forget(self.handle, scope)


class PackedJobs:
    """Jobs as compiled code reads them, which drafts for all of them in one call.

    Args:
        jobs: Of the batch; their own indexes are updated.
        blend: Made by :func:`pack_blend`, for greedy requests and then for sampled ones.
        candidates: Of heads, for each job.
    """

    def __init__(self, jobs: Sequence[Job], blend: bytes, candidates: Candidates | None) -> None:
        parts: list[Any] = [b"", blend]
        stride = max([0, *(job.max_nodes for job in jobs)])
        for job in jobs:
            text, store, archive, tokens, num_indexed, max_nodes, max_depth, chain, least = job[:9]
            recycled, logits_rows, scope, first, number, answer, output_begin, *of_request = job[9:]
            counts: tuple[int, int, int] = (0, 0, _NONE)
            arrays: Sequence[np.ndarray] = ()
            addresses = (0, 0)
            if logits_rows is not None:
                tree, accepted, *likely = logits_rows
                counts = len(likely[0]), len(accepted), accepted[-1] if accepted else _NONE
                arrays = tree.token_ids, tree.parents
                if job.step_row == _NONE:
                    arrays = *likely, *arrays
                else:
                    addresses = likely[0].ctypes.data, likely[1].ctypes.data
            packed = _PACK_JOB(
                0 if text is None else text.handle,
                0 if store is None else store.handle,
                0 if archive is None else archive.handle,
                *(least, max_nodes, max_depth, chain, len(tokens), num_indexed, first),
                *(0 if recycled is None else recycled.handle, *counts),
                *(scope, number, answer, output_begin, *of_request, *addresses),
            )
            parts += (packed, tokens, *arrays)
        predicted = (0, 0, 0, 0, 0)
        if candidates is not None:
            heads = (0 if array is None else array.ctypes.data for array in candidates)
            predicted = (*heads, *candidates.tokens.shape[1:])
        parts[0] = _PACK_BATCH(len(jobs), stride, *predicted)
        self._bytes = b"".join(parts)
        self._kept = jobs, candidates  # whose memory is read
        self._rows = np.zeros((len(jobs), 2 + 3 * stride), dtype=np.int32)
        self._stride = stride

    def draft(
        self, step: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft.

        Args:
            step: Where texts go on with a step's tokens: int64 [requests, N + 1], and how many each
                row has, int64 [requests]; contiguous.

        Returns:
            int32 [jobs], the number of each draft's nodes, and [jobs, most nodes], their tokens.

        Raises:
            MemoryError: There is no memory to draft a tree.
        """
        described = _NO_STEP
        if step is not None:
            tokens, counts = step
            described = _PACK_STEP(tokens.ctypes.data, counts.ctypes.data, tokens.shape[1])
        result = LIBRARY.functions.ngram_draft(self._bytes, described, self._rows.ctypes.data)
        if result == _NONE:
            raise MemoryError("no memory to draft a tree")
        return self._rows[:, 0], self._rows[:, 2 : 2 + self._stride]

    def drafts(self) -> list[Draft]:
        """Return what was drafted."""
        rows, stride = self._rows, self._stride
        return [
            Draft(
                TokenTree(
                    row[2 : 2 + size],
                    row[2 + stride : 2 + stride + size],
                    row[2 + 2 * stride : 2 + 2 * stride + size].view(np.float32),
                )
                if size > 0
                else TokenTree.empty(),
                used_text,
            )
            for row, size, used_text in zip(rows, *rows[:, :2].T.tolist(), strict=True)
        ]


def pack_blend(blend: Blend) -> bytes:
    """Return the parameters as compiled code reads them."""
    fields = (field if isinstance(field, tuple) else (field,) for field in blend)
    return _PACK_BLEND(*itertools.chain(*fields))


class NativeBackend:
    """Makes indexes, and drafts from them with the parameters of a blend.

    Args:
        blend: Of all requests.
        sampled: In its place for sampled ones.
    """

    def __init__(self, blend: Blend, sampled: Blend | None = None) -> None:
        LIBRARY.load()  # fails here, at the start, if it cannot be used
        self._blend = pack_blend(blend) + pack_blend(sampled or blend)

    def new_index(self, max_order: int) -> NativeIndex:
        return NativeIndex(max_order)

    def pack(self, jobs: Sequence[Job], candidates: Candidates | None = None) -> PackedJobs:
        """Return jobs to draft for."""
        return PackedJobs(jobs, self._blend, candidates)

    def draft_batch(self, jobs: Sequence[Job], candidates: Candidates | None = None) -> list[Draft]:
        """Draft for every job; updates the jobs' own indexes."""
        packed = self.pack(jobs, candidates)
        packed.draft()
        return packed.drafts()
