"""The adaptive node budget: spends nodes where they bring the most, down to none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_trie.budget.acceptance import AcceptanceCalibration
from vllm_trie.budget.allocation import best_allocation
from vllm_trie.budget.step_cost import StepCost
from vllm_trie.tree import TokenTree

_LONGEST_PAUSE = 8
_ENOUGH = 256


class NodeBudget:
    """Cuts the trees of a step to the nodes that pay.

    Learns two things while the engine runs: what a step costs by its number of tokens, and how
    often nodes are accepted by what their drafter promised. When no node of a step pays, drafting
    itself pauses, for twice as many steps each time, and is tried again.
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self.acceptance = AcceptanceCalibration()
        self._promised: list[np.ndarray] = []
        self._accepted: list[int] = []
        self._num_verified = 0
        self._pause = 0
        self._next_pause = 1

    def should_draft(self) -> bool:
        """Whether to call the drafters for the next step; counts down a pause."""
        if self._pause:
            self._pause -= 1
            return False
        return True

    def cut(self, trees: Sequence[TokenTree], num_rows: int) -> list[TokenTree]:
        """The trees without the nodes that are not worth their time.

        Trees without probabilities stay whole, and so does everything until step costs are known.

        Args:
            trees: one for each request that was drafted for.
            num_rows: requests that get a token from the next step.
        """
        whole = sum(tree.num_nodes for tree in trees if tree.probabilities is None)
        open_to_cuts = [tree for tree in trees if tree.probabilities is not None]
        total = sum(tree.num_nodes for tree in open_to_cuts)
        if not self.cost.known or not total:
            return list(trees)
        allocation = best_allocation(
            [self.acceptance(tree.probabilities) for tree in open_to_cuts],
            num_rows,
            self.cost.table(num_rows + whole + total + 1)[whole:],
        )
        kept = iter(allocation.keep)
        cut = [tree if tree.probabilities is None else _subtree(tree, next(kept)) for tree in trees]
        if any(tree.num_nodes for tree in cut):
            self._next_pause = 1
        else:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return cut

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in the measured time of one decoding step."""
        self.cost.observe(num_tokens, seconds)

    def observe_verified(
        self, trees: Sequence[TokenTree], accepted: Sequence[Sequence[int]]
    ) -> None:
        """Take in which nodes of a step's trees were accepted."""
        for tree, path in zip(trees, accepted, strict=True):
            if tree.probabilities is not None and tree.num_nodes:
                self._promised.append(tree.probabilities)
                self._accepted += [self._num_verified + node for node in path]
                self._num_verified += tree.num_nodes
        if self._num_verified >= _ENOUGH:  # one call for many nodes costs what it costs for few
            self.acceptance.observe(
                np.concatenate(self._promised), np.array(self._accepted, dtype=np.int64)
            )
            self._promised, self._accepted, self._num_verified = [], [], 0


def _subtree(tree: TokenTree, keep: np.ndarray) -> TokenTree:
    """The kept nodes in their order; parents of kept nodes are kept."""
    if keep.all():
        return tree
    if not keep.any():
        return TokenTree.empty()
    new_index = np.cumsum(keep, dtype=np.int32) - 1
    parents = tree.parents[keep]
    return TokenTree(
        tree.token_ids[keep],
        np.where(parents < 0, parents, new_index[parents]).astype(np.int32),
        tree.probabilities[keep],
        None if tree.never_accept is None else tree.never_accept[keep],
    )
