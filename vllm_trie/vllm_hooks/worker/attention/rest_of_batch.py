"""The requests of a step that have no tree, as a batch of their own for vLLM's stock kernel.

A batch in which some requests have trees is attended to in two calls, each for its own rows, so
that no row is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_trie.attention import TreeBatch
from vllm_trie.attention.device_copy import to_device


@dataclass(frozen=True)
class RestOfBatch:
    """A step without its trees."""

    metadata: Any
    """vLLM's attention metadata for these requests alone."""
    rows: slice | torch.Tensor
    """Token rows of these requests: a slice where they are neighbours, else int64 indices."""

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these requests: a view where they are neighbours, else a copy."""
        return tokens[self.rows]

    def put_back(self, own: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write what :meth:`take` returned, if it was a copy, to where it came from."""
        if not isinstance(self.rows, slice):
            tokens[self.rows] = own


def rest_of_batch(metadata: Any, trees: TreeBatch, starts: np.ndarray | None = None) -> RestOfBatch:
    """Leave the requests with trees out of a step's metadata.

    Args:
        metadata: a dataclass with vLLM's fields for lengths and blocks, one row per request. What
            else it holds is taken over as it is.
        trees: the requests to leave out; at least one request must remain.
        starts: int32 [num_requests + 1], ``metadata.query_start_loc`` where it need not be waited
            for; read from the metadata if left out.
    """
    device = metadata.query_start_loc.device
    if starts is None:
        starts = metadata.query_start_loc.cpu().numpy()
    others = np.ones(len(starts) - 1, dtype=bool)
    others[[row.batch_index for row in trees.rows]] = False
    indices = np.flatnonzero(others)
    lengths = (starts[1:] - starts[:-1])[indices]
    new_starts = np.zeros(len(indices) + 1, dtype=np.int32)
    np.cumsum(lengths, out=new_starts[1:])
    rows: slice | torch.Tensor
    if indices[-1] - indices[0] + 1 == len(indices):
        rows = slice(int(starts[indices[0]]), int(starts[indices[-1] + 1]))
    else:
        offsets = np.repeat(starts[indices] - new_starts[:-1], lengths)
        rows = to_device(offsets + np.arange(new_starts[-1], dtype=np.int64), device)
    chosen = to_device(indices, device)
    rest = replace(
        metadata,
        num_actual_tokens=int(new_starts[-1]),
        max_query_len=int(lengths.max()),
        query_start_loc=to_device(new_starts, device),
        seq_lens=metadata.seq_lens[chosen],
        block_table=metadata.block_table[chosen],
    )
    return RestOfBatch(rest, rows)
