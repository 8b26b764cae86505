"""Beams of a plain search on the device, which goes on with their children without the host.

A beam's place is its row of these arrays, its slot in the runner and the owner of its tail block.
Ranks, the order of the search, change with every step; places only where a beam has no child. When
the host hears of a choice it makes the same transition (``engine/scheduler/tables.py``)::

    step t      forward, choice of the children
    step t + 1  places, tables and tokens of the children; copies of tails; forward, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_trie.attention.device_copy import to_device
from vllm_trie.searches.candidates import Candidates
from vllm_trie.searches.device_step import (
    DeviceChildren,
    best_on_device,
    children_on_device,
    in_order,
)
from vllm_trie.searches.unfetched import Unfetched


class DeviceBeams:
    """Owner of the beams of one group on the device.

    Attributes:
        token_ids: int64 [beams], by place, the tokens to compute.
        suffix: By KV cache group int32 [beams, blocks], by place, the blocks behind those that all
            beams share.
    """

    def __init__(
        self, token_ids: np.ndarray, suffix: Sequence[np.ndarray], device: torch.device
    ) -> None:
        """Begin with the beams of a step that the host knows, each in the place of its rank."""
        self.token_ids = to_device(token_ids.astype(np.int64), device)
        self.suffix = [to_device(blocks, device) for blocks in suffix]
        self.places = torch.arange(len(token_ids), device=device)
        self._totals = torch.zeros(len(token_ids), device=device)
        self._children: DeviceChildren | None = None

    def launch(
        self,
        logits: torch.Tensor,
        totals: np.ndarray | None,
        count: int,
        stop_token_ids: Sequence[int],
    ) -> Unfetched[Candidates]:
        """Choose the candidates of a step and, among them, the children.

        Args:
            logits: float [beams, vocab], by place.
            totals: float32 [beams], the beams' cumulative log-probabilities; None for those of the
                children that the device has chosen.
            count: Candidates.
            stop_token_ids: No child ends with one.
        """
        if totals is not None:
            self._totals = to_device(totals, logits.device)
        best = best_on_device(logits, self._totals, count, places=self.places)
        self._children = children_on_device(best, self.places, stop_token_ids)
        return Unfetched(best, in_order)

    def take_children(
        self, fresh: Sequence[np.ndarray], kv_caches: Sequence[torch.Tensor], num_blocks: int
    ) -> None:
        """Put the children in the place of the beams, and copy the tails of those that move.

        Args:
            fresh: By KV cache group int32 [beams, 1], tail blocks by rank where all blocks are
                full, else [beams, 0].
            kv_caches: Of all layers, changed.
            num_blocks: Of each of them.
        """
        children, self._children = self._children, None
        if children is None:  # the choice has failed, and so will the search
            zeros = torch.zeros_like(self.token_ids)
            children = DeviceChildren(zeros, self._totals, self.places, self.places)
        places, sources = children.places, children.sources
        for i, (suffix, block_ids) in enumerate(zip(self.suffix, fresh, strict=True)):
            if block_ids.shape[1]:
                columns = suffix[sources], to_device(block_ids, suffix.device)
            else:
                columns = suffix[sources, :-1], suffix[places, -1:]
                _copy_blocks(kv_caches, num_blocks, suffix[sources, -1], suffix[places, -1])
            rows = torch.cat(columns, dim=1)  # by rank
            self.suffix[i] = torch.empty_like(rows).index_copy_(0, places, rows)
        self.token_ids = torch.empty_like(self.token_ids).scatter_(0, places, children.token_ids)
        self.places, self._totals = places, children.totals


def _copy_blocks(
    kv_caches: Sequence[torch.Tensor],
    num_blocks: int,
    sources: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    """Copy blocks in all layers as vLLM does, with ids that only the device knows.

    Args:
        kv_caches: Changed; a layer that shares another's cache is copied once.
        num_blocks: Of the scheduler, each one or more of a cache's.
        sources, targets: int [copies], distinct targets; no target is another copy's source.
    """
    for cache in {cache.data_ptr(): cache for cache in kv_caches}.values():
        blocks = torch.unflatten(cache, 0, (num_blocks, -1))  # a view
        blocks[targets] = blocks[sources]
