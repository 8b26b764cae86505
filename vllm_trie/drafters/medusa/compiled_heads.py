"""The heads in compiled code, from hidden states to trees: the fast twin of `MedusaHeads` with
`top_candidates_torch` on a CPU.

With few rows, the heads' products cost what reading their weights from memory costs. The compiled
ones read them in the order in which they lie there, once for all rows, and look at the logits while
they are in the nearest cache.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from ctypes import addressof, c_int64
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_trie.drafters.medusa import native
from vllm_trie.drafters.medusa.heads import MedusaHeads
from vllm_trie.tree import TokenTree

if TYPE_CHECKING:
    from vllm_trie.drafters.medusa.backend import Job

MAX_ROWS = 32
"""Measured up to here. With many rows arithmetic is the limit, which torch's products are built
for."""

_PACK_HEADS = native.LIBRARY.layout("Heads").pack
_HUGE_PAGE = 2 << 20


class CompiledHeads:
    """Heads whose hidden states and weights lie in a CPU's memory.

    Args:
        heads: of a dtype that :func:`native.reads` accepts; must not be moved afterwards.
        temperatures: float32 [K], positive, of the first K heads, which are used.
        num_candidates: m, tokens to take from each head; all if it has fewer.

    Attributes:
        product_nanoseconds: how long the last call was busy with the heads themselves: gathering
            the hidden states and multiplying them with the weights. None, which costs nothing, if
            it was not set before.

    Uses as many threads as torch when this is made.
    """

    def __init__(self, heads: MedusaHeads, temperatures: Tensor, num_candidates: int) -> None:
        shape = heads.shape
        weights = [heads.block_weight, heads.block_bias, heads.output_weight]
        self._kept = [None if w is None else w.detach().contiguous() for w in weights]
        self._kept += [heads.token_map, temperatures]
        self._dtype = heads.output_weight.dtype
        self._num_heads = len(temperatures)
        self._num_candidates = min(num_candidates, shape.num_outputs)
        block_weight, block_bias, output_weight, token_map, _ = map(_address, self._kept)
        self._packed = _PACK_HEADS(
            native.DTYPES[self._dtype],
            self._num_heads,
            *(shape.num_layers, shape.hidden_size, shape.num_outputs, shape.shares_output),
            *(block_weight, block_bias, output_weight, temperatures.data_ptr(), token_map),
            self._num_candidates,
        )
        self._num_threads = torch.get_num_threads()
        self._library = native.require_library()
        self._draft = self._library.medusa_draft_with_heads
        self._scoring = addressof(native.SCORING)
        self.product_nanoseconds: c_int64 | None = None

    def rows(self, states: Sequence[Tensor]) -> list[int] | None:
        """Where these hidden states, [hidden_size] each, lie; None if they are none of the dtype
        that the other methods read, or so many that torch should be asked."""
        if len(states) > MAX_ROWS:
            return None
        found, dtype = [], self._dtype
        for state in states:
            if state.dtype is not dtype or not state.is_contiguous():
                return None
            found.append(state.data_ptr())
        return found

    def top_candidates(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The candidates of each head at each state, as
        :func:`vllm_trie.drafters.medusa.candidates.top_candidates` returns them."""
        num_rows = len(rows)
        tokens, probabilities = native.room_for_candidates(
            num_rows, self._num_heads, self._num_candidates
        )
        timer = self.product_nanoseconds
        status = self._library.medusa_head_candidates(
            *(self._packed, struct.pack(f"{num_rows}q", *rows), num_rows, self._num_threads),
            *(tokens.ctypes.data, probabilities.ctypes.data),
            None if timer is None else addressof(timer),
        )
        native.check_candidates(status)
        return tokens, probabilities

    def draft_batch(self, jobs: Sequence[Job], rows: Sequence[int]) -> list[TokenTree]:
        """The trees of the jobs, job i's from the state at row i; updates the jobs' own indexes."""
        num_rows = len(rows)
        parts, stride = native.pack_jobs(jobs)
        room = native.TreeRoom(num_rows, stride)
        timer = self.product_nanoseconds
        told = 0 if timer is None else addressof(timer)
        head = struct.pack(
            f"{5 + num_rows}q", num_rows, self._num_threads, stride, self._scoring, told, *rows
        )
        return room.read(self._draft(self._packed, head + b"".join(parts), room.numbers))


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy in memory that the system may map in pages of 2 MiB, which is read a quarter faster
    than pages of 4 KiB; the tensor itself if it is small, or the system knows no such pages."""
    size = tensor.numel() * tensor.element_size()
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or size < _HUGE_PAGE or tensor.device.type != "cpu":
        return tensor
    # Shared memory, which is mmap's default, has a setting of its own, and that is mostly "never".
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
    except OSError:  # a kernel without them
        return tensor
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
    return copy.view(tensor.shape).copy_(tensor)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
