"""The trie of a search: its nodes as arrays, and the paths to finished ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_trie.searches.trace import NodeFate

FATES = tuple(NodeFate)
KEPT, DROPPED, FINISHED = map(FATES.index, (NodeFate.KEPT, NodeFate.DROPPED, NodeFate.FINISHED))


class NodeArrays(NamedTuple):
    """Nodes of a trie.

    Attributes:
        parents: int64 [nodes], -1 below the prompt; parents come before children.
        token_ids: int64 [nodes].
        logprobs: float32 [nodes], raw log-probabilities of the tokens.
        totals: float32 [nodes], (rule-adjusted) sums from the prompt to the node.
        steps: int64 [nodes], the step that made the node: its depth - 1.
        rows: int64 [nodes], the row that it extends.
        positions: int64 [nodes], its place among the candidates of the row.
        fates: uint8 [nodes], indices of :data:`FATES`.
    """

    parents: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    totals: np.ndarray
    steps: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    fates: np.ndarray


class Nodes:
    """Owner of a search's nodes. Adding some takes no time per node that exists."""

    def __init__(self) -> None:
        self._parts: list[NodeArrays] = []
        self._count = 0

    def add(self, nodes: NodeArrays) -> int:
        """Add nodes; return the index of the first."""
        first = self._count
        self._parts.append(nodes)
        self._count += len(nodes.parents)
        return first

    def all(self) -> NodeArrays:
        """Return all nodes as one set of arrays."""
        if len(self._parts) != 1:
            empty = NodeArrays(*(np.zeros(0, dtype=np.int64) for _ in NodeArrays._fields))
            parts = self._parts or [empty]
            self._parts = [NodeArrays(*map(np.concatenate, zip(*parts, strict=True)))]
        return self._parts[0]

    def paths(self, ends: np.ndarray) -> np.ndarray:
        """Return int64 [ends, greatest depth], the nodes on the path to each end.

        Column ``d`` has the node of depth ``d + 1``; behind the end there is -1.
        """
        nodes = self.all()
        result = np.full((len(ends), int(nodes.steps[ends].max(initial=-1)) + 1), -1)
        paths, current = np.arange(len(ends)), ends
        while len(current):
            result[paths, nodes.steps[current]] = current
            current = nodes.parents[current]
            inside = current >= 0
            paths, current = paths[inside], current[inside]
        return result
