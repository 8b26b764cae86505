"""The compiled selection, and the Python types that stand for it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.drafters.medusa.constants import CONCENTRATION, DISCOUNT, MIN_ORDER
from vllm_trie.native import SHARED_HEADERS, NativeLibrary
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm_trie.drafters.medusa.backend import Job
    from vllm_trie.drafters.medusa.candidates import HeadLogits

_FOLDER = Path(__file__).parent / "core"
_NGRAM_FOLDER = Path(__file__).parents[1] / "ngram_trie" / "core"
_NONE = -1
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class _Scoring(ctypes.Structure):
    _fields_ = [
        ("concentration", c_double),
        ("discount", c_double),
        ("min_order", c_int32),
    ]


_SCORING = _Scoring(CONCENTRATION, DISCOUNT, MIN_ORDER)
_PACK_JOB = struct.Struct("q4i").pack
_PACK_LOGITS = struct.Struct("11q").pack
"""Make C++'s `Job` and `HeadLogits` of their members."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


_LIBRARY = NativeLibrary(
    "medusa_select",
    "selection",
    {
        "medusa_index_new": (c_void_p, [c_int32]),
        "medusa_index_free": (None, [c_void_p]),
        "medusa_top_candidates": (c_int32, [c_char_p, c_void_p, c_void_p]),
        "medusa_select": (
            c_int32,
            [
                *(c_void_p, c_void_p, c_int64, c_int64),  # candidates
                *(c_char_p, c_int32, POINTER(_Scoring), c_int32, c_void_p),
            ],
        ),
        "medusa_draft": (
            c_int32,
            [c_char_p, c_char_p, POINTER(_Scoring), c_int32, c_void_p],
        ),
    },
    [*sorted(_FOLDER.glob("*.cpp")), _NGRAM_FOLDER / "index.cpp"],
    [*sorted([*_FOLDER.glob("*.hpp"), *_NGRAM_FOLDER.glob("*.hpp")]), *SHARED_HEADERS],
)
is_available = _LIBRARY.is_available
require_library = _LIBRARY.require


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


def select_batch(
    tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
) -> list[TokenTree]:
    """Select for every job in one native call; see :class:`Backend` for the arguments."""
    packed, stride = _pack_jobs(jobs)
    trees = _room_for_trees(len(jobs), stride)
    status = require_library().medusa_select(
        tokens.ctypes.data,
        probabilities.ctypes.data,
        *tokens.shape[1:],
        packed,
        len(jobs),
        _SCORING,
        stride,
        trees,
    )
    return _read_trees(status, trees, len(jobs), stride)


def draft_batch(jobs: Sequence[Job], ask_heads: Callable[[], HeadLogits]) -> list[TokenTree]:
    """Find the candidates and select, in one native call; see :class:`Backend` for the arguments.

    The logits must be of a kind that :func:`reads` accepts. The heads push everything else out of
    the caches, and then each new line of Python and each object costs its way there: so all that
    can be is prepared before, goes in as bytes, and all trees come out in one array.
    """
    packed, stride = _pack_jobs(jobs)
    trees = _room_for_trees(len(jobs), stride)
    draft = require_library().medusa_draft
    logits = ask_heads()  # what is packed are addresses: keep the tensors
    status = draft(_pack_logits(logits), packed, _SCORING, stride, trees)
    return _read_trees(status, trees, len(jobs), stride)


def top_candidates(logits: HeadLogits) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`vllm_trie.drafters.medusa.candidates.top_candidates` promises, for logits that
    :func:`reads` accepts; uses at most as many threads as torch."""
    num_heads, num_rows, num_outputs = logits.data.shape
    shape = (num_rows, num_heads, min(logits.num_candidates, num_outputs))
    tokens = np.empty(shape, dtype=np.int32)
    probabilities = np.empty(shape, dtype=np.float32)
    status = require_library().medusa_top_candidates(
        _pack_logits(logits), tokens.ctypes.data, probabilities.ctypes.data
    )
    if status == _NONE:
        raise MemoryError("no memory for the heads' candidates")
    return tokens, probabilities


def reads(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is compiled code for logits of this kind; their last dimension must be
    contiguous."""
    return device.type == "cpu" and dtype in _DTYPES and is_available()


def _pack_jobs(jobs: Sequence[Job]) -> tuple[bytes, int]:
    """The jobs as C++ reads them, and the most nodes that a tree may have."""
    parts, most = [], 0
    for index, text, max_nodes, max_depth, chain_only in jobs:
        handle = 0 if index is None else index.handle
        parts.append(_PACK_JOB(handle, max_nodes, max_depth, chain_only, len(text)))
        parts.append(text.tobytes())
        most = max(most, max_nodes)
    return b"".join(parts), most


def _pack_logits(logits: HeadLogits) -> bytes:
    data, temperatures, token_map, num_candidates = logits
    num_heads, num_rows, num_outputs = data.shape
    return _PACK_LOGITS(
        data.data_ptr(),
        _DTYPES[data.dtype],
        *data.stride()[:2],
        *(num_heads, num_rows, num_outputs),
        temperatures.data_ptr(),
        0 if token_map is None else token_map.data_ptr(),
        min(num_candidates, num_outputs),
        torch.get_num_threads(),
    )


def _room_for_trees(num_trees: int, stride: int) -> ctypes.Array[c_int32]:
    return (c_int32 * (num_trees * (1 + 3 * stride)))()


def _read_trees(
    status: int, trees: ctypes.Array[c_int32], num_trees: int, stride: int
) -> list[TokenTree]:
    if status == _NONE:
        raise MemoryError("no memory to choose the nodes of a tree")
    found = []
    step = 1 + 3 * stride
    for start in range(0, num_trees * step, step):
        size = trees[start]
        if not size:
            found.append(TokenTree.empty())
            continue
        first = 4 * (start + 1)
        found.append(
            TokenTree(
                np.frombuffer(trees, _INT32, size, first),
                np.frombuffer(trees, _INT32, size, first + 4 * stride),
                np.frombuffer(trees, _FLOAT32, size, first + 8 * stride),
            )
        )
    return found
