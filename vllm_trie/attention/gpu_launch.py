"""What a launch of the GPU kernel looks like, and the device memory that launches share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton  # type: ignore[import-untyped]

from vllm_trie.attention.device_copy import to_device
from vllm_trie.attention.tree_batch import TreeBatch

MIN_ROWS = 16
"""Rows of a program's matrix products, one for each query and head: the fewest that Triton has."""
_MAX_ROWS = 128
_MAX_SPLITS = 32


class Launch(NamedTuple):
    """The constants that a step's kernels are compiled for."""

    rows: int
    tile: int
    """Slots of one pass."""
    num_warps: int
    num_stages: int


def launches(head_size: int, dtype: torch.dtype) -> list[Launch]:
    """Return the launches for a layer, by rising number of rows.

    More rows pass over the keys and values fewer times, up to where registers would spill
    (`python -m tests.engine.gpu_compile_run --all` shows them). A device has 64 KiB to 227 KiB of
    shared memory for the keys and values of some passes.
    """
    padded = padded_head(head_size)
    tile = max(16, 4096 // padded)
    if dtype == torch.float32:
        return [Launch(rows, min(32, tile), 4, 2) for rows in (MIN_ROWS, 32)]
    if padded > 128:
        return [Launch(rows, tile, 4, 3) for rows in (MIN_ROWS, 32)]
    small = [Launch(rows, min(64, tile), 4, 3) for rows in (MIN_ROWS, 32, 64)]
    return [*small, Launch(_MAX_ROWS, min(64, tile), 8, 3)]


def padded_group(num_heads: int, num_kv_heads: int) -> int:
    """Return the rows of one query: the query heads of a KV head, rounded up to a power of 2."""
    return int(triton.next_power_of_2(num_heads // num_kv_heads))


def padded_head(head_size: int) -> int:
    """Return the columns of a head in a program."""
    return max(16, int(triton.next_power_of_2(head_size)))


def programs_at_once(rows: int) -> int:
    """Return the number of programs of `rows` rows that a multiprocessor has registers for."""
    return 1 if rows == _MAX_ROWS else 2


def choose_launch(max_queries: int, group: int, head_size: int, dtype: torch.dtype) -> Launch:
    """Return the smallest launch that takes all rows of a request at once. If none does, return the
    largest of up to 64 rows, as more would be wasted, or of one query.

    Raises:
        ValueError: A KV head has more query heads than any launch has rows.
    """
    choices = launches(head_size, dtype)
    takes_one = [launch for launch in choices if launch.rows >= group]
    if not takes_one:
        raise ValueError(
            f"tree attention takes at most {choices[-1].rows} query heads for a KV head in "
            f"{dtype}; the model has {group}, rounded up to a power of 2"
        )
    fits = [launch for launch in takes_one if launch.rows >= max_queries * group]
    several = [launch for launch in takes_one if launch.rows <= 64] or takes_one[:1]
    return fits[0] if fits else several[-1]


def lengths_of_launches(longest: int, group: int, head_size: int, dtype: torch.dtype) -> list[int]:
    """Return numbers of queries for which :func:`choose_launch` returns each launch that it returns
    for up to `longest`."""
    fitting = (max(1, launch.rows // group) for launch in launches(head_size, dtype))
    return sorted({min(length, longest) for length in fitting})


class Grid(NamedTuple):
    """The programs of a launch, for each KV head.

    A graph is replayed with other requests than it was captured for: the programs count the blocks
    of queries, and as many of those that run at once share the slots of each::

        program   0 1 2 3   4 5 6 7   8 9 10 11
        block     0         1         2             3 blocks, 12 programs at once
    """

    num_programs: int
    """At least one for each block."""
    at_once: int
    most_splits: int
    """Programs that share the slots of a block, at most."""
    most_shared: int
    """Blocks whose slots several programs share, at most."""


def choose_grid(
    most_blocks: int, fewest_blocks: int, num_programs: int, num_splits: int = 0
) -> Grid:
    """Return the grid of a launch.

    Args:
        most_blocks: Of queries, in any step that the launch serves.
        fewest_blocks: The same; with fewer, programs are left idle.
        num_programs: That the device runs at once, for each KV head.
        num_splits: Programs that share the slots of a block; 0 fills the device.
    """
    at_once = num_splits * most_blocks or max(1, num_programs)
    most_splits = num_splits or max(1, min(_MAX_SPLITS, at_once // fewest_blocks))
    most_shared = min(most_blocks, at_once // 2) if most_splits > 1 else 0
    return Grid(max(most_blocks, at_once), at_once, most_splits, most_shared)


class TreeBuffers:
    """Device memory that the kernels of all layers and steps share, at addresses that stay.

    Args:
        max_requests: Of a step.
        max_words: Ancestor words of a step.
        head_size: Of the layers.
        num_processors: Multiprocessors of the device.
        device: Of the cache.
        with_offsets: Whether any layer has a window or chunks, which need the nodes' offsets.

    Attributes:
        trees: int64, for each request its number of nodes and the indices of its first word and
            its first offset in this tensor; then the words and the offsets.
        partial: float32 [rows, padded head_size], weighted values of programs that share slots.
        state: float32 [rows, 2], their maxima and sums.
        max_requests, num_processors: As given.
    """

    def __init__(
        self,
        max_requests: int,
        max_words: int,
        head_size: int,
        num_processors: int,
        device: torch.device,
        with_offsets: bool = False,
    ) -> None:
        num_rows = num_processors * _MAX_ROWS  # of all programs that run at once
        size = 3 * max_requests + max_words * (1 + with_offsets)  # a node has a word or more
        self.trees = torch.zeros(size, dtype=torch.int64, device=device)
        self.partial = torch.empty(
            num_rows, padded_head(head_size), dtype=torch.float32, device=device
        )
        self.state = torch.empty(num_rows, 2, dtype=torch.float32, device=device)
        self.max_requests = max_requests
        self.num_processors = num_processors
        self._header = np.zeros((max_requests, 3), dtype=np.int64)
        self._with_offsets = with_offsets
        self._has_trees = False

    def write(self, trees: TreeBatch | None) -> None:
        """Replace the trees by those of a step, in one copy that does not wait for the device.

        Raises:
            ValueError: The ancestor words exceed the memory.
        """
        if trees is None:
            if self._has_trees:
                self.trees[: self._header.size].zero_()
            self._has_trees = False
            return
        rows, words = trees.row_array, trees.word_array.view(np.int64)
        offsets = trees.offsets if self._with_offsets else words[:0]
        size = self._header.size + len(words) + len(offsets)
        if size > len(self.trees):
            raise ValueError(
                f"the step's trees have {len(words)} ancestor words; there is memory for "
                f"{(len(self.trees) - self._header.size) // (1 + self._with_offsets)}"
            )
        counts, num_nodes = trees.num_words, rows[:, 3]
        self._header.fill(0)
        self._header[rows[:, 0], 0] = num_nodes
        self._header[rows[:, 0], 1] = self._header.size + np.cumsum(counts) - counts
        first_offset = self._header.size + len(words)
        self._header[rows[:, 0], 2] = first_offset + np.cumsum(num_nodes) - num_nodes
        packed = np.concatenate([self._header.reshape(-1), words, offsets])
        self.trees[:size].copy_(to_device(packed, self.trees.device), non_blocking=True)
        self._has_trees = True
