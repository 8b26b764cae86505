"""The adaptive node budget: spends nodes where they bring the most, down to none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_trie.budget.acceptance import AcceptanceCalibration
from vllm_trie.budget.allocation import best_allocation
from vllm_trie.budget.step_cost import StepCost
from vllm_trie.tree import TokenTree

_LONGEST_PAUSE = 64
_TRUST = 4  # how much shorter the next pause becomes by a draft that pays
_ENOUGH = 256  # verified nodes that are taken in together: one call for many costs that for few
_DECAY = 0.9  # of a request's record, each step
_BENEFIT_OF_DOUBT = 1.0  # accepted tokens that every request's record starts with
_BEST_FACTOR = 1.5
_FADING_STEPS = 64  # after which the past counts for less:
_FADING = 0.94  # what promises are worth
_RECORD_FADING = 0.5  # how a request did
_CHEAP = 0.01  # share of a plain step below which drafting in vain does not matter
_MARGIN = 0.5  # part of what a node must bring at least that is drafted for
_USUAL_NODES = 4  # a request
_FEW_NODES = 32  # a step


@dataclass(slots=True)
class _Record:
    """What a request's nodes promised and brought lately."""

    promised: float = 0.0
    accepted: float = 0.0
    in_flight: float = 0.0
    """Expected accepted tokens of the tree that is being verified."""

    @property
    def factor(self) -> float:
        """How much better or worse this request's drafts do than others of the same promise."""
        ratio = (self.accepted + _BENEFIT_OF_DOUBT) / (self.promised + _BENEFIT_OF_DOUBT)
        return min(ratio, _BEST_FACTOR)


class NodeBudget:
    """Cuts the trees of a step to the nodes that pay.

    Learns while the engine runs: what a step costs by its requests and tokens; how often nodes are
    accepted by what their drafter promised, over all requests and for each of them; what drafting
    itself costs. When speculation as a whole does not pay, drafting pauses, for twice as many steps
    each time, and is tried again.
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self.acceptance = AcceptanceCalibration()
        self._records: dict[str, _Record] = {}
        self._promised: list[np.ndarray] = []
        self._accepted: list[int] = []
        self._num_verified = 0
        self._drafting_seconds = 0.0
        self._steps = 0
        self._pause = 0
        self._rows_at_pause = 0
        self._next_pause = 1

    def should_draft(self, num_rows: int) -> bool:
        """Whether to call the drafters for the next step; counts steps, and down a pause.

        Args:
            num_rows: requests in the batch. With half or twice as many as when the pause began the
                question is another one, and the pause ends.
        """
        self._steps += 1
        if self._steps % _FADING_STEPS == 0:
            self._fade()
        if self._pause and self._rows_at_pause < 2 * num_rows < 4 * self._rows_at_pause:
            self._pause -= 1
            return False
        self._pause = 0
        return True

    def least_probabilities(self, request_ids: Sequence[str], num_rows: int) -> list[float]:
        """What a drafter must promise of a node, so that it may be worth its time in the next step.

        A node that is likely enough brings more than the step's tokens without drafts bring in the
        time that it takes. A margin is left, because the promise is compared before it is known how
        the step will be filled.

        Args:
            request_ids: requests that will be drafted for.
            num_rows: requests that get a token from the next step.
        """
        if not self.cost.known:
            return [0.0] * len(request_ids)
        nodes = max(_USUAL_NODES * num_rows, _FEW_NODES)
        seconds = self.cost.table(num_rows, num_rows + nodes + 1)
        plain = seconds[num_rows]
        slope = (seconds[num_rows + nodes] - plain) / nodes
        price = _MARGIN * num_rows / plain * slope
        records = [self._records.get(request_id) for request_id in request_ids]
        factors = np.array([1.0 if record is None else record.factor for record in records])
        least: list[float] = self.acceptance.promises_for(price / factors).tolist()
        return least

    def cut(
        self, request_ids: Sequence[str], trees: Sequence[TokenTree], num_rows: int
    ) -> list[TokenTree]:
        """The trees without the nodes that are not worth their time.

        Trees without probabilities stay whole, and so does everything until step costs are known.

        Args:
            request_ids: requests that were drafted for.
            trees: their trees.
            num_rows: requests that get a token from the next step.
        """
        cut = list(trees)
        open_to_cuts = [
            i for i, tree in enumerate(trees) if tree.probabilities is not None and tree.num_nodes
        ]
        if not self.cost.known or not open_to_cuts:
            return cut
        sizes = [trees[i].num_nodes for i in open_to_cuts]
        whole = sum(tree.num_nodes for tree in trees) - sum(sizes)
        records = [self._records.setdefault(request_ids[i], _Record()) for i in open_to_cuts]
        promised = np.concatenate([trees[i].probabilities for i in open_to_cuts])
        calibrated = self.acceptance(promised)
        factors = np.repeat([record.factor for record in records], sizes)
        seconds = self.cost.table(num_rows, num_rows + whole + len(promised) + 1)[whole:]
        allocation = best_allocation(np.minimum(calibrated * factors, 1.0), num_rows, seconds)
        plain = seconds[num_rows]
        pays = allocation.tokens_per_second * plain > num_rows * (
            1.0 + self._drafting_seconds / plain
        )
        keep = allocation.keep if pays else np.zeros(len(promised), dtype=bool)
        ends = np.cumsum(sizes)
        num_kept = np.add.reduceat(keep, ends - sizes, dtype=np.int64).tolist()
        expected = np.add.reduceat(calibrated * keep, ends - sizes).tolist()
        for place, (i, record) in enumerate(zip(open_to_cuts, records, strict=True)):
            record.in_flight = expected[place]
            end = ends[place]
            cut[i] = _subtree(trees[i], keep[end - sizes[place] : end], num_kept[place])
        if pays or whole:
            # One lucky draft does not end the caution, a few in a row do.
            self._next_pause = max(self._next_pause // _TRUST, 1)
        elif self._drafting_seconds > _CHEAP * plain:
            self._pause, self._rows_at_pause = self._next_pause, num_rows
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        return cut

    def expect_step(self, num_tokens: int, seconds: float) -> None:
        """Take in a first idea of what a step of so many tokens takes."""
        self.cost.expect(num_tokens, seconds)

    def observe_step(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take in the measured time of one decoding step, drafting left out."""
        self.cost.observe(num_rows, num_tokens, seconds)

    def observe_drafting(self, seconds: float) -> None:
        """Take in what drafting for one step took, with everything around it."""
        self._drafting_seconds += 0.05 * (seconds - self._drafting_seconds)

    def observe_verified(
        self,
        request_ids: Sequence[str],
        trees: Sequence[TokenTree],
        accepted: Sequence[Sequence[int]],
    ) -> None:
        """Take in which nodes of a step's trees were accepted."""
        for request_id, tree, path in zip(request_ids, trees, accepted, strict=True):
            if tree.probabilities is None or not tree.num_nodes:
                continue
            record = self._records.get(request_id)
            if record is not None:
                record.promised = _DECAY * record.promised + record.in_flight
                record.accepted = _DECAY * record.accepted + len(path)
            self._promised.append(tree.probabilities)
            self._accepted += [self._num_verified + node for node in path]
            self._num_verified += tree.num_nodes
        if self._num_verified >= _ENOUGH:
            self.acceptance.observe(
                np.concatenate(self._promised), np.array(self._accepted, dtype=np.int64)
            )
            self._promised, self._accepted, self._num_verified = [], [], 0

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._records.pop(request_id, None)

    def _fade(self) -> None:
        """Forget a little, or what failed would never be tried again on another text: nodes that
        are not verified teach nothing."""
        self.acceptance.fade(_FADING)
        for record in self._records.values():
            record.promised *= _RECORD_FADING
            record.accepted *= _RECORD_FADING


def _subtree(tree: TokenTree, keep: np.ndarray, num_kept: int) -> TokenTree:
    """The kept nodes in their order; parents of kept nodes are kept."""
    if num_kept == len(keep):
        return tree
    if not num_kept:
        return TokenTree.empty()
    if keep[:num_kept].all():  # so it is if the likeliest nodes come first
        return tree.prefix(num_kept)
    new_index = np.cumsum(keep, dtype=np.int32) - 1
    parents = tree.parents[keep]
    return TokenTree(
        tree.token_ids[keep],
        np.where(parents < 0, parents, new_index[parents]).astype(np.int32),
        tree.probabilities[keep],
        None if tree.never_accept is None else tree.never_accept[keep],
    )
