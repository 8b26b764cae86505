"""Growing a tree best-first, in readable Python: the twin of core/best_first.hpp.

The likeliest node that is known is chosen, then its children become known. A node is at most as
likely as its parent, so the chosen ones are the likeliest of all, and parents come first.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from vllm_trie.tree import TokenTree, depth_first_layout


class Guess(NamedTuple):
    """A node that is known."""

    probability: float
    """Of its whole path."""
    token: int
    parent: int
    """Number of a chosen guess, `ROOT` for the last committed token."""
    depth: int


class BestFirstTree:
    """The likeliest guesses within the limits of a tree.

    Args:
        max_nodes, max_depth: Limits of the tree.
        chain_only: Whether a node has at most one child.
        min_probability: Of a node's path; what is less likely is left out.
        odds: Of a node in the tree, in relation to those of its guess.
    """

    def __init__(
        self,
        max_nodes: int,
        max_depth: int,
        chain_only: bool = False,
        min_probability: float = 0.0,
        odds: float = 1.0,
    ) -> None:
        self.chosen: list[Guess] = []
        self._max_nodes = max_nodes if max_depth > 0 else 0
        self._max_depth = max_depth
        self._chain_only = chain_only
        self._min_probability = _scale_odds(min_probability, 1.0 / odds)
        self._odds = odds
        self._heap: list[tuple[float, int, Guess]] = []
        self._ticks = itertools.count()  # order of discovery, breaks ties
        self._best: list[float] = []  # the max_nodes largest probabilities so far, a min-heap

    def bound(self) -> float:
        """Return the probability below which a guess cannot be chosen any more."""
        is_full = self._best and len(self._best) == self._max_nodes
        return max(self._best[0], self._min_probability) if is_full else self._min_probability

    def discover(self, probability: float, token: int, parent: int, depth: int) -> None:
        """Make a child of guess number `parent` known, unless it has no probability (or NaN)."""
        if not probability > 0.0 or probability < self._min_probability:
            return
        guess = Guess(probability, token, parent, depth)
        heapq.heappush(self._heap, (-probability, next(self._ticks), guess))
        if len(self._best) < self._max_nodes:
            heapq.heappush(self._best, probability)
        else:
            heapq.heappushpop(self._best, probability)

    def choose(self) -> Guess | None:
        """Choose the likeliest known guess; None if the tree is done."""
        if not self._heap or len(self.chosen) >= self._max_nodes:
            return None
        guess = heapq.heappop(self._heap)[-1]
        self.chosen.append(guess)
        if self._chain_only:
            self._heap.clear()
            self._best.clear()
        return guess

    def may_grow(self) -> bool:
        """Return whether the guess chosen last may have children in the tree."""
        return self.chosen[-1].depth < self._max_depth and len(self.chosen) < self._max_nodes

    def lay_out(self) -> TokenTree:
        """Return the chosen guesses, depth-first with the likeliest child first."""
        if not self.chosen:
            return TokenTree.empty()
        probabilities, tokens, parents, _ = zip(*self.chosen, strict=True)
        scaled = [_scale_odds(min(value, 1.0), self._odds) for value in probabilities]
        return depth_first_layout(TokenTree.from_lists(tokens, parents, scaled))


def _scale_odds(probability: float, factor: float) -> float:
    return factor * probability / (1.0 - probability + factor * probability)
