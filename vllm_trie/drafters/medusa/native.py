"""The compiled selection, and the Python types that stand for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int32, create_string_buffer
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
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers that stand for the dtypes of which there is compiled code."""
SOURCES = (*sorted(_FOLDER.glob("*.cpp")), _NGRAM_FOLDER / "index.cpp")
HEADERS = (
    *sorted([*_FOLDER.glob("*.hpp"), *_NGRAM_FOLDER.glob("*.hpp")]),
    *SHARED_HEADERS,
)
LIBRARY = NativeLibrary("medusa_select", "selection", SOURCES, HEADERS)
is_available = LIBRARY.is_available
require_library = LIBRARY.require
_PACK_JOB = LIBRARY.layout("Job").pack
_PACK_LOGITS = LIBRARY.layout("HeadLogits").pack
SCORING = create_string_buffer(
    LIBRARY.layout("Scoring").pack(CONCENTRATION, DISCOUNT, MIN_ORDER),
)


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


def pack_jobs(jobs: Sequence[Job]) -> tuple[list[bytes], int]:
    """The jobs as C++ reads them one after the other, and the most nodes that a tree may have."""
    parts, most = [], 0
    for index, text, max_nodes, max_depth, chain_only, least in jobs:
        handle = 0 if index is None else index.handle
        parts.append(_PACK_JOB(handle, least, max_nodes, max_depth, chain_only, len(text)))
        parts.append(text.tobytes())
        if max_nodes > most:
            most = max_nodes
    return parts, most


class TreeRoom:
    """Trees of `stride` nodes for compiled code to write.

    The heads push everything else out of the caches, and then each new line of Python and each
    object costs its way there: so the trees are made before they are asked, as large as they may
    become, and all that is left to do is to cut those that have not become that large.
    """

    __slots__ = ("numbers", "stride", "trees")

    def __init__(self, num_trees: int, stride: int) -> None:
        self.stride = stride
        self.numbers = numbers = (c_int32 * (num_trees * (1 + 3 * stride)))()
        size, read = 4 * stride, np.frombuffer
        self.trees = (
            [
                TokenTree(
                    read(numbers, _INT32, stride, start),
                    read(numbers, _INT32, stride, start + size),
                    read(numbers, _FLOAT32, stride, start + 2 * size),
                )
                for start in range(4 * num_trees, 4 * len(numbers), 3 * size)
            ]
            if stride
            else [TokenTree.empty()] * num_trees
        )

    def read(self, status: int) -> list[TokenTree]:
        """The trees that a native function has written.

        Raises:
            MemoryError: by its status it had no memory.
        """
        if status == 0:  # all of them fill their room
            return self.trees
        if status == _NONE:
            raise MemoryError("no memory to choose the nodes of a tree")
        trees, numbers, stride = self.trees, self.numbers, self.stride
        for i in range(len(trees)):
            size = numbers[i]
            if size != stride:
                trees[i] = trees[i].prefix(size) if size else TokenTree.empty()
        return trees


def select_batch(
    tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
) -> list[TokenTree]:
    """Select for every job in one native call; see :class:`Backend` for the arguments."""
    packed, stride = pack_jobs(jobs)
    room = TreeRoom(len(jobs), stride)
    status = require_library().medusa_select(
        tokens.ctypes.data,
        probabilities.ctypes.data,
        *tokens.shape[1:],
        b"".join(packed),
        len(jobs),
        *(SCORING, stride, room.numbers),
    )
    return room.read(status)


def draft_batch(jobs: Sequence[Job], ask_heads: Callable[[], HeadLogits]) -> list[TokenTree]:
    """Find the candidates and select, in one native call; see :class:`Backend` for the arguments.

    The logits must be of a kind that :func:`reads` accepts.
    """
    packed, stride = pack_jobs(jobs)
    room = TreeRoom(len(jobs), stride)
    draft = require_library().medusa_draft
    logits = ask_heads()  # what is packed are addresses: keep the tensors
    return room.read(draft(_pack_logits(logits), b"".join(packed), SCORING, stride, room.numbers))


def top_candidates(logits: HeadLogits) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`vllm_trie.drafters.medusa.candidates.top_candidates` promises, for logits that
    :func:`reads` accepts; uses at most as many threads as torch."""
    num_heads, num_rows, num_outputs = logits.data.shape
    tokens, probabilities = room_for_candidates(
        num_rows, num_heads, min(logits.num_candidates, num_outputs)
    )
    status = require_library().medusa_top_candidates(
        _pack_logits(logits), tokens.ctypes.data, probabilities.ctypes.data
    )
    check_candidates(status)
    return tokens, probabilities


def room_for_candidates(
    num_rows: int, num_heads: int, num_candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 and probabilities float32, both [num_rows, num_heads, num_candidates]."""
    shape = (num_rows, num_heads, num_candidates)
    return np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32)


def check_candidates(status: int) -> None:
    """Raise MemoryError if a native function that looks for candidates had no memory."""
    if status == _NONE:
        raise MemoryError("no memory for the heads' candidates")


def reads(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is compiled code for logits of this kind; their last dimension must be
    contiguous."""
    return device.type == "cpu" and dtype in DTYPES and is_available()


def _pack_logits(logits: HeadLogits) -> bytes:
    data, temperatures, token_map, num_candidates = logits
    num_heads, num_rows, num_outputs = data.shape
    return _PACK_LOGITS(
        data.data_ptr(),
        DTYPES[data.dtype],
        *data.stride()[:2],
        *(num_heads, num_rows, num_outputs),
        temperatures.data_ptr(),
        0 if token_map is None else token_map.data_ptr(),
        min(num_candidates, num_outputs),
        torch.get_num_threads(),
    )
