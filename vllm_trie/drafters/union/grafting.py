"""Grafting: what other parts draft after each token of a trained drafter's chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_trie.drafters.base import Drafter, DraftRequest
from vllm_trie.drafters.union.merge import Graft
from vllm_trie.tree import TokenTree

_SHARE_OF_NODES = 4
"""A graft inside the chain has at most this fraction of the step's nodes; the one at its end, which
goes on where the chain stops, may have twice as many."""


def graft(
    part: Drafter, index: int, requests: Sequence[DraftRequest], trees: Sequence[TokenTree]
) -> list[list[Graft]]:
    """Return a part's candidates after each token of some chains, by request.

    Args:
        part: Asked once for all of them.
        index: Of the part.
        requests: As of the step.
        trees: Of the trained drafter, whose first branch is the chain.
    """
    grafts: list[list[Graft]] = [[] for _ in requests]
    asked, added, owners = [], [], []
    for row, (request, tree) in enumerate(zip(requests, trees, strict=True)):
        chain = tree.chain().token_list
        for length in range(1, len(chain) + 1):
            share = request.max_nodes // _SHARE_OF_NODES
            max_nodes = max(1, share if length < len(chain) else 2 * share)
            if length < request.max_depth:
                asked.append(replace(request, max_nodes=max_nodes, min_probability=0.0))
                added.append(chain[:length])
                owners.append(row)
    if asked:
        drafted = part.propose_after(asked, added)
        for row, path, tree in zip(owners, added, drafted, strict=True):
            if tree.num_nodes:
                grafts[row].append(Graft(index, path, tree))
    return grafts
