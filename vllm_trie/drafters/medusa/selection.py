"""Choosing the nodes of a dynamic tree: the readable twin of core/select.cpp.

The tree holds the `max_nodes` likeliest paths over the heads' candidates. A path's probability is
at most its parent's, so taking the likeliest node that is known and then making its children known
finds exactly those paths, parents first.

There are two ways to compute how likely a path is:

- As the product of the heads' probabilities. This is the problem of Algorithm 1 of "Acceleration of
  Multiple Heads Decoding for LLM via Dynamic Tree Attention", which solves it layer by layer
  (`algorithm1` here); best-first visits no layer's candidates that cannot make it.
- With a text, token by token from the contexts of every length that end there, the longest first.
  The heads take the place of the shortest context in interpolated Kneser-Ney smoothing: they get
  what no context has claimed. With n successors counted after a context, u of them distinct,
  successor t of count c gets (c - d) / (n + theta) of the probability that is left, and
  (theta + d·u) / (n + theta) is passed on (Teh, "A hierarchical Bayesian language model based on
  Pitman-Yor processes", 2006, eq. 4, with the heads as the base distribution).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_trie.drafters.medusa.constants import CONCENTRATION, DISCOUNT, MIN_LEFT, MIN_ORDER
from vllm_trie.drafters.ngram_trie.contexts import (
    Match,
    advance,
    count_successors,
    match_suffix,
)
from vllm_trie.drafters.ngram_trie.index import NgramIndex
from vllm_trie.tree import ROOT, TokenTree, depth_first_layout


class Limits(NamedTuple):
    """Limits of one tree."""

    max_nodes: int
    max_depth: int
    chain_only: bool = False
    min_probability: float = 0.0
    """Nodes whose path is less likely are left out."""


class Job(NamedTuple):
    """One request of a batch, with the limits of its tree."""

    index: Any | None
    """Index of the request's own text; None for the product of the heads alone."""
    text: np.ndarray
    """int32 [num_tokens]; the index is brought up to date with it."""
    max_nodes: int
    max_depth: int
    chain_only: bool
    min_probability: float = 0.0


def new_index(max_order: int) -> NgramIndex:
    """Return an index of a text that is empty yet."""
    return NgramIndex(max_order)


def select_batch(
    tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
) -> list[TokenTree]:
    """Return the tree of every job, one after the other; see :class:`Backend`."""
    return [
        select(tokens[i], probabilities[i], Limits(*limits), index, text.tolist())
        for i, (index, text, *limits) in enumerate(jobs)
    ]


def select(
    tokens: np.ndarray,
    probabilities: np.ndarray,
    limits: Limits,
    index: NgramIndex | None = None,
    text: Sequence[int] = (),
) -> TokenTree:
    """Return the tree of the likeliest paths.

    Args:
        tokens, probabilities: int32 and float32 [K, m], each head's candidates, likeliest first.
            What has no probability is no candidate.
        index: of the request's own text, None for the product of the heads alone; brought up to
            date with `text` here.
    """
    known: list[list[Match]] = []
    if index is not None:
        index.synchronize(list(text))
        known.append(match_suffix(index, text))
    nodes: list[tuple[int, int, float]] = []
    # (-probability, order of discovery, token, parent, depth)
    heap: list[tuple[float, int, int, int, int]] = []
    discovered = 0

    def discover(parent: int, above: float, depth: int) -> None:
        nonlocal discovered
        shares: dict[int, float] = {}
        left = 1.0
        if index is not None:
            shares, left = _blend(index, known[parent + 1])
        if depth <= len(tokens) and left >= MIN_LEFT:
            row = zip(tokens[depth - 1].tolist(), probabilities[depth - 1].tolist(), strict=True)
            for token, probability in row:
                shares[token] = shares.get(token, 0.0) + left * probability
        for token, share in shares.items():
            path = above * share
            if not path > 0.0 or path < limits.min_probability:
                continue
            heapq.heappush(heap, (-path, discovered, token, parent, depth))
            discovered += 1

    discover(ROOT, 1.0, 1)
    while heap and len(nodes) < limits.max_nodes:
        negative, _, token, parent, depth = heapq.heappop(heap)
        nodes.append((token, parent, min(-negative, 1.0)))
        if limits.chain_only:
            heap.clear()
        if index is not None:
            known.append(advance(index, known[parent + 1], token))
        if depth < limits.max_depth:
            discover(len(nodes) - 1, -negative, depth + 1)
    if not nodes:
        return TokenTree.empty()
    chosen_tokens, parents, values = zip(*nodes, strict=True)
    return depth_first_layout(TokenTree.from_lists(chosen_tokens, parents, values))


def algorithm1(probabilities: np.ndarray, num_nodes: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the best paths of ranks by product, with their probabilities, likeliest first.

    This is Algorithm 1 as the paper has it, an oracle for `select`. Layer by layer, each head
    extends every path in a queue bounded to `num_nodes`; paths that fall out of it cannot have a
    child in it. `probabilities`: [K, m].
    """
    queue: list[tuple[float, tuple[int, ...]]] = []  # a min-heap of at most num_nodes paths
    layer: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for shares in probabilities.tolist():
        extended = []
        for above, path in layer:
            for rank, share in enumerate(shares):
                candidate = (above * share, (*path, rank))
                if len(queue) < num_nodes:
                    heapq.heappush(queue, candidate)
                elif candidate > queue[0]:
                    heapq.heapreplace(queue, candidate)
                else:
                    break
                extended.append(candidate)
        kept = set(queue)
        layer = [candidate for candidate in extended if candidate in kept]
    return [(path, value) for value, path in sorted(queue, key=lambda item: (-item[0], item[1]))]


def _blend(index: NgramIndex, contexts: list[Match]) -> tuple[dict[int, float], float]:
    """Return the text's share of each successor's probability, and what it leaves to the heads."""
    shares: dict[int, float] = {}
    left = 1.0
    for order in range(len(contexts) - 1, MIN_ORDER - 1, -1):
        counts, num_types, num_children = count_successors(index, contexts[order])
        if num_children == 0:
            continue
        total = num_types + CONCENTRATION
        for token, count in counts:
            shares[token] = shares.get(token, 0.0) + left * (count - DISCOUNT) / total
        left = left * (CONCENTRATION + DISCOUNT * num_children) / total
    return shares, left
