"""Beams of plain searches on the device, which goes on with their children without the host.

A beam's place is its row of these arrays, its slot in the runner and the owner of its tail block.
Ranks, the order of the search, change with every step; places only where a beam has no child. When
the host hears of a choice it makes the same transition (``engine/scheduler/tables.py``)::

    step t      forward, choice of the children
    step t + 1  places, tables and tokens of the children; copies of tails; forward, ...
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

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

DeviceBeams = MutableMapping[str, DeviceChildren]
"""The latest children of each search, arrays [beams] in place of [searches, beams]."""


def launch_children(
    beams: DeviceBeams,
    searches: Sequence[tuple[str, np.ndarray | None]],
    logits: torch.Tensor,
    count: int,
    stop_token_ids: Sequence[int],
) -> Unfetched[list[Candidates]]:
    """Choose the candidates of a step of searches and, among them, the children.

    Args:
        beams: Of the searches, changed.
        searches: The name of each, and float32 [beams], the cumulative log-probabilities of its
            beams, which are in the places of their ranks; None for those of the children that the
            device has chosen.
        logits: float [searches * beams, vocab], of each search by place.
        count: Candidates of each search.
        stop_token_ids: No child ends with one.
    """
    names = [name for name, _ in searches]
    if ranked := {name: totals for name, totals in searches if totals is not None}:
        numbers = torch.arange(len(logits) // len(names), device=logits.device)
        zeros = torch.zeros_like(numbers)
        parts = to_device(np.stack([*ranked.values()]), logits.device)
        for name, part in zip(ranked, parts, strict=True):
            # If the choice fails, so will the search.
            beams[name] = DeviceChildren(zeros, part, numbers, numbers)
    places = torch.stack([beams[name].places for name in names])
    totals = torch.stack([beams[name].totals for name in names])
    best = best_on_device(logits, totals, count, places=places)
    children = children_on_device(best, places, stop_token_ids)
    beams.update(zip(names, map(DeviceChildren._make, zip(*children, strict=True)), strict=True))
    return Unfetched(best, in_order)


def move_rows(
    table: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    tails: torch.Tensor,
    fresh: torch.Tensor,
) -> torch.Tensor:
    """Give children the blocks of their parents, and tail blocks of their own.

    Args:
        table: int32 [slots, blocks], changed.
        sources, targets: int64 [beams], the slots of their parents, and theirs: a permutation.
        tails: int64 [beams], the column of each tail block.
        fresh: int64 [beams], a new tail block, -1 for the tail block of the child's slot.

    Returns:
        int64 [2, beams], the blocks to copy to the tails, and the tails: themselves where nothing
        is to be copied.
    """
    is_fresh = fresh >= 0
    written = torch.where(is_fresh, fresh, table[targets, tails])
    copied = torch.where(is_fresh, fresh, table[sources, tails])
    rows = table[sources]
    rows.scatter_(1, tails[:, None], written[:, None].int())
    table.index_copy_(0, targets, rows)
    return torch.stack([copied, written])
