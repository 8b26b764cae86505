"""The C++ kernels of ``cpu/``, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_trie.attention.cache_layout import SUPPORTED_ISAS
from vllm_trie.attention.kind import FULL_ATTENTION, AttentionKind
from vllm_trie.attention.tree_batch import TreeBatch
from vllm_trie.native import NativeLibrary

_FOLDER = Path(__file__).parent / "cpu"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MULTIPLE = 16
"""Head sizes and block sizes are multiples of this; those of vLLM's CPU backend all are, and with
AMX of twice as many."""


LIBRARY = NativeLibrary("attention", sorted(_FOLDER.glob("*.cpp")), sorted(_FOLDER.glob("*.hpp")))


class NativeKernels:
    """Typed access to the kernels. Any thread may call them.

    Args:
        instructions: Instruction set, the processor's best one if left out.
    """

    def __init__(self, instructions: str | None = None) -> None:
        library = LIBRARY.load(instructions)
        self._tree_attention = library.vllm_trie_tree_attention
        self._pack_attention = LIBRARY.layout("Arguments").pack
        self._move_slots = library.vllm_trie_move_slots
        self._copy_blocks = library.vllm_trie_copy_blocks
        self._likeliest = library.vllm_trie_likeliest
        lanes = library.vllm_trie_lanes()
        self.instructions: str = {16: "AVX-512", 8: "AVX2"}.get(lanes, "SSE2")
        """What the products are computed with."""
        if library.vllm_trie_bf16_products():
            self.instructions += " with bfloat16 products"
        self.has_tiles = bool(library.vllm_trie_tiles())
        """Whether a cache of AMX's layout is multiplied in tiles."""
        if self.has_tiles:
            self.instructions += " and AMX tiles"
        self.has_openmp = bool(library.vllm_trie_has_openmp())
        """Whether the process has an OpenMP runtime, so that several threads can work."""

    def tree_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        trees: TreeBatch,
        scale: float,
        output: torch.Tensor,
        kind: AttentionKind = FULL_ATTENTION,
        isa: str = "vec",
    ) -> bool:
        """Do what :func:`vllm_trie.attention.tree_attention` does, with the same arguments.

        Uses as many threads as torch does. Sums are float32. With AVX-512's bfloat16 instructions
        and in AMX tiles the products of bfloat16 queries and keys are exact, and the weights in
        tiles have 16 bits, so that results in 16-bit formats carry the rounding of the output and
        next to nothing else.

        Returns:
            False, with nothing done, if the shapes, strides or dtypes are none of vLLM's, or for
            windows, chunks and linear biases of requests that share slots.
        """
        _, num_kv_heads, block_size, double_head_size = kv_cache.shape
        num_heads, head_size = query.shape[1], query.shape[2]
        dtype = _DTYPES.get(query.dtype)
        needs_positions = kind.is_partial or kind.alibi_slopes is not None
        if (
            dtype is None
            or kv_cache.dtype != query.dtype
            or output.dtype != query.dtype
            or block_table.dtype != torch.int32
            or not _are_laid_out(kv_cache, isa)
            or double_head_size != 2 * head_size
            or scale <= 0
            or query.stride()[1:] != (head_size, 1)
            or output.stride()[1:] != (head_size, 1)
            or kv_cache.stride()[2:] != (double_head_size, 1)
            or block_table.stride(1) != 1
            or not _is_plain(kind.alibi_slopes, num_heads)
            or not _is_plain(kind.sinks, num_heads)
            or (needs_positions and trees.row_array[:, 5].any())
        ):
            return False
        rows, words = trees.row_array, trees.word_array
        offsets = trees.offsets if needs_positions else None
        packed = self._pack_attention(
            dtype,
            *(query.data_ptr(), query.stride(0)),
            *(kv_cache.data_ptr(), *kv_cache.stride()[:2]),
            *(block_table.data_ptr(), block_table.stride(0)),
            *(rows.ctypes.data, words.ctypes.data),
            *(0 if offsets is None else offsets.ctypes.data, len(rows)),
            *(output.data_ptr(), output.stride(0)),
            *(num_heads, num_kv_heads, head_size, block_size, isa == "amx", scale),
            *(kind.window, kind.chunk, kind.soft_cap),
            *(0 if of is None else of.data_ptr() for of in (kind.sinks, kind.alibi_slopes)),
            torch.get_num_threads(),
        )
        return bool(self._tree_attention(packed) == 0)

    def likeliest(self, logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the `count` likeliest tokens of each row of logits, and their probabilities.

        Reads the logits once. Of equal ones the smallest token comes first. A row with a NaN begins
        with the first one, and has probabilities of 0, as has a row without a finite maximum.

        Args:
            logits: float32, bfloat16 or float16 [rows, vocabulary].
            count: At most 64 and the vocabulary.

        Returns:
            int32 and float32, [rows, count].
        """
        if logits.dtype not in _DTYPES or logits.stride(1) != 1:
            logits = logits.to(torch.float32).contiguous()
        rows, size = logits.shape
        tokens = np.empty((rows, count), dtype=np.int32)
        probabilities = np.empty((rows, count), dtype=np.float32)
        status = self._likeliest(
            *(_DTYPES[logits.dtype], logits.data_ptr(), rows, logits.stride(0), size, count),
            *(tokens.ctypes.data, probabilities.ctypes.data, torch.get_num_threads()),
        )
        if status:
            raise ValueError(f"no {count} likeliest of {size} tokens")
        return tokens, probabilities

    def move_slots(
        self,
        caches: Sequence[torch.Tensor],
        source: torch.Tensor,
        target: torch.Tensor,
        isa: str = "vec",
    ) -> bool:
        """Do what :func:`vllm_trie.attention.move_slots` does, with the same arguments.

        Returns:
            False, with nothing done, if the caches differ or are none of vLLM's.
        """
        if not _are_alike(caches, isa):
            return False
        source, target = source.contiguous(), target.contiguous()
        self._move_slots(
            *_described(caches, isa),
            source.data_ptr(),
            target.data_ptr(),
            len(source),
            torch.get_num_threads(),
        )
        return True

    def copy_blocks(self, caches: Sequence[torch.Tensor], copies: np.ndarray) -> None:
        """Copy blocks to other blocks in every layer's cache, in place.

        Args:
            caches: One tensor per layer, [num_blocks, ...], in which each block is contiguous.
            copies: int64 [n, 2], source and target block; no target is the source of another copy.
        """
        sizes = [(c.stride(0) * c.element_size(), c[0].nbytes) for c in caches]
        strides, num_bytes = np.array(sizes, dtype=np.int64).T.copy()
        self._copy_blocks(
            _pointers(caches),
            strides.ctypes.data,
            num_bytes.ctypes.data,
            len(caches),
            copies.ctypes.data,
            len(copies),
            torch.get_num_threads(),
        )


def _are_laid_out(cache: torch.Tensor, isa: str) -> bool:
    """Return whether a layout is that of a cache's dtype, block size and head size."""
    multiple = 2 * _MULTIPLE if isa == "amx" else _MULTIPLE
    return (
        isa in SUPPORTED_ISAS
        and (isa != "amx" or cache.dtype == torch.bfloat16)
        and cache.shape[2] % multiple == 0
        and cache.shape[3] % (2 * multiple) == 0
    )


def _are_alike(caches: Sequence[torch.Tensor], isa: str) -> bool:
    first = caches[0]
    return (
        first.ndim == 4
        and first.device.type == "cpu"
        and first.dtype in _DTYPES
        and _are_laid_out(first, isa)
        and first.stride()[2:] == (first.shape[3], 1)
        and all(
            cache.shape == first.shape
            and cache.dtype == first.dtype
            and cache.stride() == first.stride()
            for cache in caches[1:]
        )
    )


def _pointers(caches: Sequence[torch.Tensor]) -> Any:
    return (ctypes.c_void_p * len(caches))(*[cache.data_ptr() for cache in caches])


def _described(caches: Sequence[torch.Tensor], isa: str) -> tuple[Any, ...]:
    """Return the first arguments of what moves slots."""
    first = caches[0]
    _, num_kv_heads, block_size, double_head_size = first.shape
    return (
        first.element_size(),
        _pointers(caches),
        len(caches),
        *(first.stride(0), first.stride(1)),
        *(num_kv_heads, block_size, double_head_size // 2, isa == "amx"),
    )


def _is_plain(of_heads: torch.Tensor | None, num_heads: int) -> bool:
    return of_heads is None or (
        of_heads.dtype == torch.float32
        and of_heads.shape == (num_heads,)
        and of_heads.is_contiguous()
    )
