"""The compiled selection, and the Python types that stand for it."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_trie.drafters.medusa.constants import CONCENTRATION, DISCOUNT, MIN_ORDER
from vllm_trie.native import SHARED_HEADERS, load_library
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


_SCORING = _Scoring(CONCENTRATION, DISCOUNT, MIN_ORDER)
_PACK = struct.Struct("10q").pack
"""Makes C++'s `MedusaJob` of its members."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


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
    """Select for every job in one native call; updates the jobs' own indexes.

    After a step of the model nothing of this is in the caches, and each new line of Python and each
    object costs its way there: so all jobs go in as one array, and all trees come out as one.
    """
    if not jobs:
        return []
    rows = b"".join(
        _PACK(
            0 if index is None else index.handle,
            _address(text),
            len(text),
            _address(tokens),
            _address(probabilities),
            *tokens.shape,
            *limits,
        )
        for tokens, probabilities, limits, index, text in jobs
    )
    stride = max(job[2][0] for job in jobs)
    trees = np.empty((len(jobs), 1 + 3 * stride), dtype=np.int32)
    status = require_library().medusa_select(rows, len(jobs), _SCORING, stride, _address(trees))
    if status == _NONE:
        raise MemoryError("no memory for the n-grams of a request")
    shares = trees.view(np.float32)
    second, third = 1 + stride, 1 + 2 * stride
    return [
        TokenTree(
            trees[i, 1 : 1 + size],
            trees[i, second : second + size],
            shares[i, third : third + size],
        )
        if size
        else TokenTree.empty()
        for i, size in enumerate(trees[:, 0].tolist())
    ]


def top_candidates(
    logits: Tensor, num_tokens: int, temperatures: Tensor
) -> tuple[Tensor, Tensor] | None:
    """What :func:`vllm_trie.drafters.medusa.candidates.top_candidates` promises, with the same
    arguments; uses at most as many threads as torch.

    Returns:
        None where there is no compiled code for these tensors or the logits have no softmax.
    """
    dtype = _DTYPES.get(logits.dtype)
    if dtype is None or not logits.is_cpu or logits.stride(2) != 1 or not is_available():
        return None
    num_heads, num_rows, num_outputs = logits.shape
    num_tokens = min(num_tokens, num_outputs)
    found = np.empty((2, num_rows, num_heads, num_tokens), dtype=np.int32)
    first = _address(found)
    status = require_library().medusa_top_candidates(
        dtype,
        logits.data_ptr(),
        logits.stride(0),
        logits.stride(1),
        num_rows,
        num_heads,
        num_outputs,
        num_tokens,
        temperatures.data_ptr(),
        first,
        first + found.strides[0],
        torch.get_num_threads(),
    )
    if status:
        return None
    return torch.from_numpy(found[0]), torch.from_numpy(found[1].view(np.float32))


def _address(array: np.ndarray) -> int:
    """Quicker than `array.ctypes.data`."""
    return array.__array_interface__["data"][0]


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
        [_FOLDER / "select.cpp", _FOLDER / "candidates.cpp", _NGRAM_FOLDER / "index.cpp"],
        headers=[_NGRAM_FOLDER / "index.hpp", *SHARED_HEADERS],
    )
    if library is None:
        return None
    pointer = c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "medusa_index_new": (pointer, [c_int32]),
        "medusa_index_free": (None, [pointer]),
        "medusa_select": (
            c_int32,
            [c_char_p, c_int32, POINTER(_Scoring), c_int32, pointer],
        ),
        "medusa_top_candidates": (
            c_int32,
            [
                *(c_int32, pointer, c_int64, c_int64),  # logits
                *(c_int32, c_int32, c_int32, c_int32),  # rows, heads, outputs, candidates
                *(pointer, pointer, pointer, c_int32),  # temperatures, results, threads
            ],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library
