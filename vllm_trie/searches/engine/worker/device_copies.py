"""Copies of KV blocks in all layers of a device's caches, with one launch.

vLLM's own copies take two launches for each layer, and copy every block to a place between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from vllm.triton_utils import tl, triton

from vllm_trie.attention.device_copy import to_device

_PART = 4096
"""Words that a program copies."""
_WORD = 4
"""Bytes of a word."""


class BlockCopier:
    """The places of blocks in the KV caches of a device.

    Args:
        kv_caches: Of all layers; of those that begin at one address the largest is taken.
        num_blocks: Of the scheduler, each one or more of a cache's.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        runs = []
        by_size = sorted(kv_caches, key=lambda cache: cache.nbytes)
        for cache in {cache.data_ptr(): cache for cache in by_size}.values():  # the largest stays
            blocks = cache.unflatten(0, (num_blocks, -1))
            size = blocks.element_size()
            for run in _contiguous(blocks[0]):
                runs.append((run.data_ptr(), blocks.stride(0) * size, run.numel() * size))
        array = np.array(runs, dtype=np.int64)
        array[:, 1:] //= _WORD
        self._runs = to_device(array, kv_caches[0].device)
        self._most_parts = -(-int(array[:, 2].max()) // _PART)

    def copy(self, copies: torch.Tensor) -> None:
        """Copy blocks in all layers.

        Args:
            copies: int64 [2, copies], contiguous: the blocks that are copied, and distinct others
                that they are copied to, or themselves. No block is both otherwise.
        """
        grid = copies.shape[1], len(self._runs), self._most_parts
        _copy_blocks[grid](copies, self._runs, PART=_PART)


def warm_up(device: torch.device) -> None:
    """Compile the kernel, before vLLM watches that no request waits for such."""
    copies = torch.zeros((2, 1), dtype=torch.int64, device=device)
    BlockCopier([torch.zeros((1, 1), dtype=torch.float32, device=device)], 1).copy(copies)


def _contiguous(block: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the parts of a tensor that are contiguous in memory, in whatever order."""
    extents = [(size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True)]
    if sum(extents) == block.numel() - 1:
        yield block
    else:
        for part in block.unbind(int(np.argmax(extents))):
            yield from _contiguous(part)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_blocks(copies_ptr, runs_ptr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    copy, run = tl.program_id(0), tl.program_id(1)
    source = tl.load(copies_ptr + copy)
    target = tl.load(copies_ptr + tl.num_programs(0) + copy)
    address = tl.load(runs_ptr + 3 * run)
    stride = tl.load(runs_ptr + 3 * run + 1)
    size = tl.load(runs_ptr + 3 * run + 2)
    words = tl.cast(address, tl.pointer_type(tl.int32))
    word = tl.program_id(2).to(tl.int64) * PART + tl.arange(0, PART)
    is_copied = (word < size) & (source != target)
    values = tl.load(words + source * stride + word, mask=is_copied)
    tl.store(words + target * stride + word, values, mask=is_copied)
