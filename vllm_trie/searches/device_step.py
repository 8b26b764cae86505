"""A step of searches of one width on a device, which nobody waits for.

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
    logits: torch.Tensor, totals: Sequence[np.ndarray], count: int, rules: TokenRules | None = None
) -> Unfetched[list[Candidates]]:
    """Return the result of :func:`select_best` for each search, without a wait for a device.

    Args:
        logits: float [searches * beams, vocabulary], on any device.
        totals: float32 [beams] of each search.
        count: Of each search.
        rules: They come before the choice, None if there are none; they are those of one search.
    """
    best = best_on_device(logits, to_device(np.stack(totals), logits.device), count, rules)
    return Unfetched(best, in_order)


class BestOnDevice(NamedTuple):
    """Continuations on a device, of each search best first.

    Attributes:
        rows: int64 [searches, count], of the search.
        token_ids: int64 [searches, count].
        keys: float32 [searches, count], log-probabilities after rules; -inf or NaN for a
            continuation that does not exist.
        logprobs: float32 [searches, count], log-probabilities before rules.
        scores: float32 [searches, count], sums of `keys` and the totals.
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
    """Return the `count` best continuations of each search, at most all that there are.

    Args:
        logits: float [searches * beams, vocabulary].
        totals: float32 [searches, beams], on the same device; -inf for a row without continuations.
        rules: They come before the choice; None if there are none.
        places: int64 [searches, beams], the row of the search's logits of each of its rows; None if
            they are in order. Not with rules.
    """
    searches, beams = totals.shape
    blocks, logprobs = blocks_of(logits, rules)
    size, per_row = blocks.size, blocks.maxima.shape[1]
    firsts = torch.arange(0, len(logits), beams, device=logits.device)[:, None]
    # Blocks, in the order of their best continuations: score, row, log-probability, token.
    maxima = blocks.maxima if places is None else blocks.maxima[places + firsts]
    maxima, order = maxima.view(searches, beams, -1).sort(descending=True, stable=True)
    flat = _sorted_scores(maxima + totals[:, :, None]).indices[:, :count]
    rows = flat // per_row
    chosen = rows * per_row + order.flatten(1).gather(1, flat)
    chosen = chosen.sort().values  # by row and token
    rows, columns = chosen // per_row, chosen % per_row
    in_logits = firsts + (rows if places is None else places.gather(1, rows))
    keys = blocks.at(in_logits.flatten(), columns.flatten()).view(searches, -1, size)
    scores = (keys + totals.gather(1, rows)[:, :, None]).flatten(1)
    keys = keys.flatten(1)
    # The same order for continuations: sorted by what matters less first.
    by_key = keys.sort(descending=True, stable=True).indices
    by_row = by_key.gather(1, rows.gather(1, by_key // size).sort(stable=True).indices)
    best, of_rows = _sorted_scores(scores.gather(1, by_row))
    chosen = by_row.gather(1, of_rows[:, :count])
    block = chosen // size
    rows, token_ids = rows.gather(1, block), columns.gather(1, block) * size
    token_ids += chosen % size
    keys = keys.gather(1, chosen)
    if logprobs is not None:
        raw = logprobs[firsts + rows, token_ids.clamp(max=logits.shape[1] - 1)]
    return BestOnDevice(rows, token_ids, keys, keys if logprobs is None else raw, best[:, :count])


def _sorted_scores(scores: torch.Tensor) -> Any:
    """Return each search's scores, the greatest first, and their indices; NaN counts as -inf."""
    flat = scores.flatten(1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    return flat.sort(descending=True, stable=True)


def in_order(*best: np.ndarray) -> list[Candidates]:
    """Return the continuations that exist of each search, by row, best first within a row.

    Args:
        best: The arrays of a :class:`BestOnDevice`.
    """
    candidates = []
    for rows, token_ids, keys, logprobs, scores in zip(*best, strict=True):
        order = np.lexsort((token_ids, -keys, rows))
        order = order[scores[order] > -np.inf]
        candidates.append(Candidates(rows[order], token_ids[order], logprobs[order]))
    return candidates


class DeviceChildren(NamedTuple):
    """The beams of the next step on a device, of each search best first.

    There are as many as before. Those that do not exist come last: nothing can follow them.

    Attributes:
        token_ids: int64 [searches, beams].
        totals: float32 [searches, beams], -inf for a beam that does not exist.
        places: int64 [searches, beams], the place of each: a permutation. The first child of a beam
            stays in its place, others take those of beams without children.
        sources: int64 [searches, beams], the places of the beams that they extend.
    """

    token_ids: torch.Tensor
    totals: torch.Tensor
    places: torch.Tensor
    sources: torch.Tensor


def children_on_device(
    best: BestOnDevice, places: torch.Tensor, stop_token_ids: Sequence[int]
) -> DeviceChildren:
    """Return the children of a step of plain searches: the best continuations that go on.

    Args:
        best: Continuations of all beams.
        places: int64 [searches, beams], the place of each beam.
        stop_token_ids: No child ends with one; a few.
    """
    searches, width = places.shape
    continues = best.scores > -torch.inf
    for stop_token_id in stop_token_ids:
        continues &= best.token_ids != stop_token_id
    chosen = (~continues).sort(stable=True).indices[:, :width]
    exists = continues.gather(1, chosen)
    # A child that does not exist has a parent that nobody is.
    parents = torch.where(exists, best.rows.gather(1, chosen), width)
    numbers = torch.arange(width, device=places.device).expand(searches, width)
    first_child = numbers.new_full((searches, width + 1), width)
    first_child.scatter_reduce_(1, parents, numbers, "amin")
    stays = (first_child.gather(1, parents) == numbers) & exists
    # Those without children first.
    spare = (first_child[:, :width] < width).sort(stable=True).indices
    taken = places.gather(1, spare.gather(1, ((~stays).cumsum(1) - 1).clamp_(min=0)))
    sources = places.gather(1, parents.clamp(max=width - 1))
    new_places = torch.where(stays, sources, taken)
    return DeviceChildren(
        best.token_ids.gather(1, chosen),
        best.scores.gather(1, chosen).masked_fill(~exists, -torch.inf),
        new_places,
        torch.where(exists, sources, new_places),
    )
