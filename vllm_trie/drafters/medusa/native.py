"""The compiled selection of a tree's nodes, and the compiled search for the heads' candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int32
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.drafters.medusa import constants
from vllm_trie.native import DEFAULT_FLAGS, SHARED_HEADERS, NativeLibrary
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm_trie.drafters.medusa.candidates import HeadLogits
    from vllm_trie.drafters.medusa.selection import Job

_FOLDER = Path(__file__).parent / "core"
_NGRAM_FOLDER = Path(__file__).parents[1] / "ngram_trie" / "core"
_NONE = -1
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers that stand for the dtypes of which there is compiled code."""
_CONSTANTS = ("CONCENTRATION", "DISCOUNT", "MIN_LEFT", "MIN_ORDER")

LIBRARY_ARGUMENTS = (
    "medusa_select",
    "selection",
    (*sorted(_FOLDER.glob("*.cpp")), _NGRAM_FOLDER / "index.cpp"),
    (*sorted([*_FOLDER.glob("*.hpp"), *_NGRAM_FOLDER.glob("*.hpp")]), *SHARED_HEADERS),
    (*DEFAULT_FLAGS, *(f"-DMEDUSA_{name}={getattr(constants, name)!r}" for name in _CONSTANTS)),
)
LIBRARY = NativeLibrary(*LIBRARY_ARGUMENTS)
is_available = LIBRARY.is_available
require_library = LIBRARY.require
_pack_job = LIBRARY.layout("Job").pack
_pack_batch = LIBRARY.layout("Batch").pack
_pack_logits = LIBRARY.layout("HeadLogits").pack


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


def new_index(max_order: int) -> NativeIndex:
    """Return an index of a text that is empty yet."""
    return NativeIndex(max_order)


class BatchOfJobs:
    """Jobs as C++ reads them, and room for their trees.

    The heads push everything else out of the caches, and then each new line of Python and each
    object costs its way there. So the trees are made before the call, as large as they may become;
    afterwards those that stayed smaller are cut.

    Attributes:
        packed: a `Batch` of core/api.cpp, the given addresses, and the jobs.
        numbers: what the call writes the trees to.
    """

    __slots__ = ("_stride", "_trees", "numbers", "packed")

    def __init__(self, jobs: Sequence[Job], addresses: bytes = b"") -> None:
        parts, stride = [b"", addresses], 0
        for index, text, max_nodes, max_depth, chain_only, least in jobs:
            handle = 0 if index is None else index.handle
            parts.append(_pack_job(handle, least, max_nodes, max_depth, chain_only, len(text)))
            parts.append(text.tobytes())
            if max_nodes > stride:
                stride = max_nodes
        parts[0] = _pack_batch(len(jobs), stride)
        self.packed = b"".join(parts)
        self.numbers = numbers = (c_int32 * (len(jobs) * (1 + 3 * stride)))()
        self._stride, size, read = stride, 4 * stride, np.frombuffer
        self._trees = (
            [
                TokenTree(
                    read(numbers, _INT32, stride, start),
                    read(numbers, _INT32, stride, start + size),
                    read(numbers, _FLOAT32, stride, start + 2 * size),
                )
                for start in range(4 * len(jobs), 4 * len(numbers), 3 * size)
            ]
            if stride
            else [TokenTree.empty()] * len(jobs)
        )

    def trees(self, status: int) -> list[TokenTree]:
        """Return the trees that a native function has written.

        Raises:
            MemoryError: by its status it had no memory.
        """
        if status == 0:  # all of them fill their room
            return self._trees
        if status == _NONE:
            raise MemoryError("no memory to choose the nodes of a tree")
        trees, numbers, stride = self._trees, self.numbers, self._stride
        for i in range(len(trees)):
            size = numbers[i]
            if size != stride:
                trees[i] = trees[i].prefix(size) if size else TokenTree.empty()
        return trees


def select_batch(
    tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
) -> list[TokenTree]:
    """Select for every job in one native call; see :class:`Backend`."""
    batch = BatchOfJobs(jobs)
    return batch.trees(
        require_library().medusa_select(
            *(tokens.ctypes.data, probabilities.ctypes.data, *tokens.shape[1:]),
            *(batch.packed, batch.numbers),
        )
    )


def reads(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there is compiled code for logits and weights of this kind."""
    return device.type == "cpu" and dtype in DTYPES and is_available()


def top_candidates(logits: HeadLogits) -> tuple[np.ndarray, np.ndarray]:
    """Return what :func:`vllm_trie.drafters.medusa.candidates.top_candidates` does.

    The logits must be of a kind that :func:`reads` accepts. Uses at most as many threads as torch.
    """
    data, temperatures, token_map, num_candidates = logits
    num_heads, num_rows, num_outputs = data.shape
    num_candidates = min(num_candidates, num_outputs)
    packed = _pack_logits(
        *(data.data_ptr(), DTYPES[data.dtype], *data.stride()[:2]),
        *(num_heads, num_rows, num_outputs, temperatures.data_ptr()),
        *(0 if token_map is None else token_map.data_ptr(), num_candidates),
        torch.get_num_threads(),
    )
    find = require_library().medusa_top_candidates
    return write_candidates(
        (num_rows, num_heads, num_candidates), lambda *room: find(packed, *room)
    )


def write_candidates(
    shape: tuple[int, int, int], find: Callable[[int, int], int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens int32 and probabilities float32 of this shape, [rows, K, m], that
    `find(address of tokens, address of probabilities)` has written.

    Raises:
        MemoryError: by its status it had no memory.
    """
    tokens, probabilities = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32)
    if find(tokens.ctypes.data, probabilities.ctypes.data) == _NONE:
        raise MemoryError("no memory for the heads' candidates")
    return tokens, probabilities
