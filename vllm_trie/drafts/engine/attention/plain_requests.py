"""The requests of a step that have no tree, as a batch of their own for vLLM's stock kernel.

A batch in which some requests have trees is attended to in two calls, each for its own query
tokens, so that none is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from vllm_trie.attention import TreeBatch
from vllm_trie.attention.device_copy import to_device


@dataclass(frozen=True)
class PlainRequests:
    """A step without its trees."""

    metadata: Any
    """vLLM's attention metadata for these requests alone."""
    tokens: slice | torch.Tensor
    """Query tokens of these requests: a slice where they are neighbours, else int64 indices."""

    def take(self, batch: torch.Tensor) -> torch.Tensor:
        """Return what belongs to these requests: a view where they are neighbours, else a copy."""
        return batch[self.tokens]

    def put_back(self, taken: torch.Tensor, batch: torch.Tensor) -> None:
        """Write what :meth:`take` returned to where it came from, if it was a copy."""
        if not isinstance(self.tokens, slice):
            batch[self.tokens] = taken


def plain_requests(metadata: Any, trees: TreeBatch) -> PlainRequests:
    """Leave the requests with trees out of a step's metadata.

    Args:
        metadata: A dataclass with vLLM's fields for lengths and blocks of each request. Its other
            fields are taken over.
        trees: The requests to leave out; at least one request must remain.
    """
    device = metadata.query_start_loc.device
    starts = metadata.query_start_loc.cpu().numpy()
    # By their tokens: a request in chunks has several rows.
    first, count = trees.row_array[:, 1:3].T
    tree = np.searchsorted(first, starts[:-1], side="right") - 1
    indices = np.flatnonzero((tree < 0) | (starts[:-1] >= (first + count)[tree]))
    lengths = (starts[1:] - starts[:-1])[indices]
    new_starts = np.zeros(len(indices) + 1, dtype=np.int32)
    np.cumsum(lengths, out=new_starts[1:])
    tokens: slice | torch.Tensor
    if indices[-1] - indices[0] + 1 == len(indices):
        tokens = slice(int(starts[indices[0]]), int(starts[indices[-1] + 1]))
    else:
        offsets = np.repeat(starts[indices] - new_starts[:-1], lengths)
        tokens = to_device(offsets + np.arange(new_starts[-1], dtype=np.int64), device)
    chosen = to_device(indices, device)
    plain = replace(
        metadata,
        num_actual_tokens=int(new_starts[-1]),
        max_query_len=int(lengths.max()),
        query_start_loc=to_device(new_starts, device),
        seq_lens=metadata.seq_lens[chosen],
        block_table=metadata.block_table[chosen],
    )
    return PlainRequests(plain, tokens)
