"""The heads in compiled code, from hidden states to trees: the fast twin of `MedusaHeads` with
`top_candidates_torch` on a CPU.

With few rows, the heads' products cost what reading their weights from memory costs. The compiled
ones read them in the order in which they lie there, once for all rows, and look at the logits while
they are in the nearest cache.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Sequence
from ctypes import addressof, c_int64
from time import perf_counter

import torch
from torch import Tensor

from vllm_trie.drafters.medusa.candidates import BLEND, DTYPES, LIBRARY, write_candidates
from vllm_trie.drafters.medusa.heads import HeadTiming, MedusaHeads
from vllm_trie.ngrams.job import Candidates, Job
from vllm_trie.ngrams.native import DraftBatch, pack_blend
from vllm_trie.tree import TokenTree

MAX_ROWS = 32
"""Measured up to here. With many rows arithmetic is the limit, which torch's products are built
for."""

_HUGE_PAGE = 2 << 20


class CompiledHeads:
    """Heads whose hidden states and weights lie in a CPU's memory.

    Args:
        heads: Of a dtype that :func:`~vllm_trie.drafters.medusa.candidates.reads` accepts; must not
            be moved afterwards.
        temperatures: float32 [K], positive, of the first K heads, which are used.
        num_candidates: m, tokens to take from each head; all if it has fewer.

    Uses as many threads as torch when this is made.
    """

    def __init__(self, heads: MedusaHeads, temperatures: Tensor, num_candidates: int) -> None:
        shape = heads.shape
        weights = [heads.block_weight, heads.block_bias, heads.output_weight]
        self._kept = [None if w is None else w.detach().contiguous() for w in weights]
        self._kept += [temperatures, heads.token_map]
        self._dtype = heads.output_weight.dtype
        self._num_heads = len(temperatures)
        self._num_candidates = min(num_candidates, shape.num_outputs)
        self._product_nanoseconds = c_int64()
        self._packed = LIBRARY.layout("Heads").pack(
            DTYPES[self._dtype],
            self._num_heads,
            *(shape.num_layers, shape.hidden_size, shape.num_outputs, shape.shares_output),
            *(0 if tensor is None else tensor.data_ptr() for tensor in self._kept),
            *(self._num_candidates, torch.get_num_threads(), addressof(self._product_nanoseconds)),
        )
        self._blend = pack_blend(BLEND)
        self._library = LIBRARY.require()

    @property
    def product_seconds(self) -> float:
        """How long the last call was busy with the heads themselves: gathering the hidden states
        and multiplying them with the weights."""
        return 1e-9 * self._product_nanoseconds.value

    def rows(self, states: Sequence[Tensor]) -> list[int] | None:
        """Return the addresses of these hidden states, [hidden_size] each; None if they are not of
        the dtype that the other methods read, or more than `MAX_ROWS`."""
        if len(states) > MAX_ROWS:
            return None
        addresses, dtype = [], self._dtype
        for state in states:
            if state.dtype is not dtype or not state.is_contiguous():
                return None
            addresses.append(state.data_ptr())
        return addresses

    def top_candidates(self, rows: Sequence[int]) -> Candidates:
        """Return each head's candidates at each state, as
        :func:`vllm_trie.drafters.medusa.candidates.top_candidates` does."""
        addresses, find = array("q", rows).tobytes(), self._library.medusa_head_candidates
        return write_candidates(
            (len(rows), self._num_heads, self._num_candidates),
            lambda *at: find(self._packed, addresses, len(rows), *at),
        )

    def draft_batch(
        self, jobs: Sequence[Job], rows: Sequence[int], timing: HeadTiming
    ) -> list[TokenTree]:
        """Return the trees of the jobs, job i's from the state at row i; updates the jobs' own
        indexes."""
        batch = DraftBatch(jobs, self._blend)
        addresses, packed = array("q", rows).tobytes(), b"".join(batch.parts)
        timing.asked = perf_counter()
        status = self._library.medusa_draft(self._packed, addresses, packed, batch.rows)
        timing.products = self.product_seconds
        return batch.trees(status)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Return a copy in memory that the system may map in pages of 2 MiB, which is read a quarter
    faster than pages of 4 KiB; the tensor itself if it is small or the system has no such pages."""
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
