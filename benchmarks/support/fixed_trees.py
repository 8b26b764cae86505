"""Fixed trees of Medusa heads, as the reference in benchmarks: published, or any.

A tree is a list of paths; a path names, head by head, the rank of the candidate to take. The
published list puts the likeliest path first, so the first n paths are the n-node tree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import Field

from vllm_trie.drafts import DraftRequest
from vllm_trie.extras.heads import MedusaDrafter, MedusaOptions
from vllm_trie.tree import TokenTree

Path = tuple[int, ...]


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(tuple(map(int, path)) for path in text.split())


# Each word is a path: "021" takes rank 0 of the first head, rank 2 of the second, 1 of the third.
PUBLISHED = _paths(
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 "
    "40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 "
    "90 060 0001 16 070"
)
"""The list `mc_sim_7b_63` of FasterDecoding/Medusa, medusa/model/medusa_choices.py, as facts; 63
nodes, which with the last committed token make the 64 that the papers speak of."""


class TreeTemplate(NamedTuple):
    """A fixed tree, depth-first with the likeliest child first."""

    parents: np.ndarray
    """int32 [N]."""
    heads: np.ndarray
    """int64 [N], the head that guesses each node."""
    ranks: np.ndarray
    """int64 [N], which of its candidates."""
    levels: tuple[tuple[np.ndarray, np.ndarray], ...]
    """For each depth after the first its nodes and their parents."""

    def fill(self, tokens: np.ndarray, probabilities: np.ndarray) -> TokenTree:
        """Return the tree with candidates put in; `tokens` and `probabilities` are [K, m] as
        `candidates` returns them for one row."""
        path = probabilities[self.heads, self.ranks]
        for nodes, parents in self.levels:
            path[nodes] *= path[parents]
        return TokenTree(tokens[self.heads, self.ranks], self.parents, path)


@functools.lru_cache(maxsize=512)
def template(
    paths: tuple[Path, ...], max_nodes: int, max_depth: int, chain_only: bool
) -> TreeTemplate:
    """Return the tree of the first `max_nodes` paths that are at most `max_depth` long."""
    chosen = [path for path in paths if len(path) <= max_depth]
    if chain_only:
        chosen = [path for path in chosen if not any(path)]
    chosen = sorted(chosen[:max_nodes])  # lexicographic is depth-first with the lowest rank first
    index = {path: node for node, path in enumerate(chosen)}
    parents = np.array([index.get(path[:-1], -1) for path in chosen], dtype=np.int32)
    heads = np.array([len(path) - 1 for path in chosen], dtype=np.int64)
    levels = []
    for depth in range(1, max(map(len, chosen), default=0)):
        nodes = np.flatnonzero(heads == depth)
        levels.append((nodes, parents[nodes]))
    ranks = np.array([path[-1] for path in chosen], dtype=np.int64)
    return TreeTemplate(parents, heads, ranks, tuple(levels))


class FixedTreeOptions(MedusaOptions):
    """Those of `medusa_dynamic`, and the tree."""

    paths: list[list[int]] = Field(
        default=[list(path) for path in PUBLISHED],
        description="Paths, each behind its parent and the best first.",
    )


class FixedTreeDrafter(MedusaDrafter):
    """Fills the same tree at every step, its first n paths."""

    name = "medusa_fixed"
    Options = FixedTreeOptions

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        tokens, probabilities, _ = self.candidates(requests)
        paths = tuple(map(tuple, self.options.paths))
        return [
            template(paths, request.max_nodes, request.max_depth, request.chain_only).fill(
                tokens[row], probabilities[row]
            )
            for row, request in enumerate(requests)
        ]
