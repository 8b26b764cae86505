"""The compiled selection, and the Python types that stand for it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_trie.drafters.medusa.constants import CONCENTRATION, DISCOUNT, MIN_ORDER
from vllm_trie.native import load_library
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm_trie.drafters.medusa.backend import Job

_FOLDER = Path(__file__).parent / "core"
_NGRAM_FOLDER = Path(__file__).parents[1] / "ngram_trie" / "core"
_NONE = -1


class _Scoring(ctypes.Structure):
    _fields_ = [
        ("concentration", c_double),
        ("discount", c_double),
        ("min_order", c_int32),
    ]


class _Job(ctypes.Structure):
    _fields_ = [
        ("own", c_void_p),
        ("tokens", c_void_p),
        ("num_tokens", c_int64),
        ("head_tokens", c_void_p),
        ("head_probabilities", c_void_p),
        ("num_heads", c_int32),
        ("num_candidates", c_int32),
        ("max_nodes", c_int32),
        ("max_depth", c_int32),
        ("chain_only", c_int32),
        ("num_nodes", c_int32),
    ]


class NativeIndex:
    """An n-gram index of one text in native memory, freed with the object."""

    def __init__(self, max_order: int) -> None:
        self._library = require_library()
        self.handle = self._library.medusa_index_new(max_order)
        if not self.handle:
            raise MemoryError("no memory for an n-gram index")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.medusa_index_free(self.handle)


def select_batch(jobs: Sequence[Job]) -> list[TokenTree]:
    """Select for every job in one native call; updates the jobs' own indexes."""
    if not jobs:
        return []
    rows = (_Job * len(jobs))()
    stride = max(job.limits.max_nodes for job in jobs)
    for row, job in zip(rows, jobs, strict=True):
        row.own = None if job.index is None else job.index.handle
        row.tokens = job.text.ctypes.data
        row.num_tokens = len(job.text)
        row.head_tokens = job.tokens.ctypes.data
        row.head_probabilities = job.probabilities.ctypes.data
        row.num_heads, row.num_candidates = job.tokens.shape
        row.max_nodes, row.max_depth, row.chain_only = job.limits
    token_ids = np.empty((len(jobs), stride), dtype=np.int32)
    parents = np.empty((len(jobs), stride), dtype=np.int32)
    probabilities = np.empty((len(jobs), stride), dtype=np.float32)
    status = require_library().medusa_select(
        rows,
        len(jobs),
        _Scoring(CONCENTRATION, DISCOUNT, MIN_ORDER),
        stride,
        token_ids.ctypes.data,
        parents.ctypes.data,
        probabilities.ctypes.data,
    )
    if status == _NONE:
        raise MemoryError("no memory for the n-grams of a request")
    trees = []
    for i, row in enumerate(rows):
        size = row.num_nodes
        tree = TokenTree(token_ids[i, :size], parents[i, :size], probabilities[i, :size])
        trees.append(tree if size else TokenTree.empty())
    return trees


def is_available() -> bool:
    """Whether the compiled selection can be used; compiles it at the first call."""
    return _library() is not None


def require_library() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("the compiled selection is not available; see the log for the reason")
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(
        "medusa_select",
        [_FOLDER / "select.cpp", _NGRAM_FOLDER / "index.cpp"],
        headers=[_NGRAM_FOLDER / "index.hpp"],
    )
    if library is None:
        return None
    pointer = c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "medusa_index_new": (pointer, [c_int32]),
        "medusa_index_free": (None, [pointer]),
        "medusa_select": (
            c_int32,
            [POINTER(_Job), c_int32, POINTER(_Scoring), c_int32, pointer, pointer, pointer],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
