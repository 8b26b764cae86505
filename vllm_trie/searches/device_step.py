"""A step of a search on a device, which nobody waits for.

The choice of :func:`~vllm_trie.searches.top_k.select_best`, ties included, with shapes that do not
depend on values: where that one takes what reaches a bound, this one sorts. A plain search can go
on without the host, which hears of the choice later: :func:`children_on_device` chooses the
children that :meth:`~vllm_trie.searches.BeamSearch.advance` will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_trie.attention.device_copy import to_device
from vllm_trie.searches.blocks import TokenRules, blocks_of
from vllm_trie.searches.candidates import Candidates
from vllm_trie.searches.unfetched import Unfetched


def launch_best(
    logits: torch.Tensor, totals: np.ndarray, count: int, rules: TokenRules | None = None
) -> Unfetched[Candidates]:
    """Return the result of :func:`select_best` without a wait for a device.

    All shapes are fixed: where it takes what reaches a bound, this one sorts. Arguments as there,
    on any device.
    """
    best = best_on_device(logits, to_device(totals, logits.device), count, rules)
    return Unfetched(best, in_order)


class BestOnDevice(NamedTuple):
    """Continuations on a device, best first.

    Attributes:
        rows: int64 [count].
        token_ids: int64 [count].
        keys: float32 [count], log-probabilities after rules; -inf or NaN for a continuation that
            does not exist.
        logprobs: float32 [count], log-probabilities before rules.
        scores: float32 [count], sums of `keys` and the totals.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    keys: torch.Tensor
    logprobs: torch.Tensor
    scores: torch.Tensor


def best_on_device(
    logits: torch.Tensor,
    totals: torch.Tensor,
    count: int,
    rules: TokenRules | None = None,
    places: torch.Tensor | None = None,
) -> BestOnDevice:
    """Return the `count` best continuations of all rows together, at most all that there are.

    Args:
        logits: float [rows, vocabulary].
        totals: float32 [rows], on the same device; -inf for a row without continuations.
        count: Continuations.
        rules: They come before the choice; None if there are none.
        places: int64 [rows], the row of logits of each row of the search; None if they are in
            order. Not with rules.
    """
    blocks, logprobs = blocks_of(logits, rules)
    size, per_row = blocks.size, blocks.maxima.shape[1]
    # Blocks, in the order of their best continuations: score, row, log-probability, token.
    maxima = blocks.maxima if places is None else blocks.maxima[places]
    maxima, order = maxima.sort(dim=1, descending=True, stable=True)
    flat = _sorted_scores(maxima + totals[:, None]).indices[:count]
    rows = flat // per_row
    chosen = (rows * per_row + order.view(-1)[flat]).sort().values  # by row and token
    rows, columns = chosen // per_row, chosen % per_row
    keys = blocks.at(rows if places is None else places[rows], columns)
    scores = (keys + totals[rows, None]).view(-1)
    keys = keys.view(-1)
    # The same order for continuations: sorted by what matters less first.
    by_key = keys.sort(descending=True, stable=True).indices
    by_row = by_key[rows[by_key // size].sort(stable=True).indices]
    best, of_rows = _sorted_scores(scores[by_row])
    chosen = by_row[of_rows[:count]]
    rows, token_ids = rows[chosen // size], columns[chosen // size] * size
    token_ids += chosen % size
    keys = keys[chosen]
    if logprobs is not None:
        raw = logprobs[rows, token_ids.clamp(max=logits.shape[1] - 1)]
    return BestOnDevice(rows, token_ids, keys, keys if logprobs is None else raw, best[:count])


def _sorted_scores(scores: torch.Tensor) -> Any:
    """Return scores, the greatest first, and their indices; NaN counts as -inf."""
    flat = scores.reshape(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return flat.sort(descending=True, stable=True)


def in_order(
    rows: np.ndarray,
    token_ids: np.ndarray,
    keys: np.ndarray,
    logprobs: np.ndarray,
    scores: np.ndarray,
) -> Candidates:
    """Return the continuations that exist, by row, best first within a row."""
    order = np.lexsort((token_ids, -keys, rows))
    order = order[scores[order] > -np.inf]
    return Candidates(rows[order], token_ids[order], logprobs[order])


class DeviceChildren(NamedTuple):
    """The beams of the next step on a device, best first.

    There are as many as before. Those that do not exist come last: nothing can follow them.

    Attributes:
        token_ids: int64 [beams].
        totals: float32 [beams], -inf for a beam that does not exist.
        places: int64 [beams], the place of each: a permutation. The first child of a beam stays in
            its place, others take those of beams without children.
        sources: int64 [beams], the places of the beams that they extend.
    """

    token_ids: torch.Tensor
    totals: torch.Tensor
    places: torch.Tensor
    sources: torch.Tensor


def children_on_device(
    best: BestOnDevice, places: torch.Tensor, stop_token_ids: Sequence[int]
) -> DeviceChildren:
    """Return the children of a step of a plain search: the best continuations that go on.

    Args:
        best: Continuations of all beams.
        places: int64 [beams], the place of each beam.
        stop_token_ids: No child ends with one.
    """
    width = len(places)
    continues = best.scores > -torch.inf
    for stop_token_id in stop_token_ids:
        continues &= best.token_ids != stop_token_id
    chosen = (~continues).sort(stable=True).indices[:width]
    exists = continues[chosen]
    parents = torch.where(exists, best.rows[chosen], width)  # a parent that nobody is
    numbers = torch.arange(width, device=places.device)
    first_child = numbers.new_full((width + 1,), width)
    first_child.scatter_reduce_(0, parents, numbers, "amin")
    stays = (first_child[parents] == numbers) & exists
    spare = (first_child[:width] < width).sort(stable=True).indices  # those without children first
    taken = places[spare[((~stays).cumsum(0) - 1).clamp_(min=0)]]
    sources = places[parents.clamp(max=width - 1)]
    new_places = torch.where(stays, sources, taken)
    return DeviceChildren(
        best.token_ids[chosen],
        best.scores[chosen].masked_fill(~exists, -torch.inf),
        new_places,
        torch.where(exists, sources, new_places),
    )
