"""The adaptive node budget: verifies as many nodes as speed decoding up, down to none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_trie.drafts.budget.acceptance import AcceptanceCalibration
from vllm_trie.drafts.budget.allocation import choose_nodes
from vllm_trie.drafts.budget.step_cost import StepCost, moved
from vllm_trie.tree import TokenTree, select_all

_MAX_PAUSE = 64  # steps
# Of a pause, times the share of drafting in a plain step. Likely nodes come in bursts, which a long
# pause misses; a short one costs less than 1 % of the time.
_PAUSE_BY_COST = 128
_PAUSE_DIVISOR = 4  # of the next pause, for each draft that is worth its time
# Statistics lose weight at intervals, or rejected nodes would never be verified again on another
# text: nodes that are not verified teach nothing.
_FADING_STEPS = 64
_FIRST_DRAFTING = 1e-4  # seconds
_MARGIN = 0.9  # of a node's minimum gain, for the minimum probability that drafters get
_FEW_NODES = 32  # a step
# Doubt in what nodes cost, as a share of its logarithm: it grows with each draft that is not worth
# its time and falls with each that is, whose step corrects the cost.
_DOUBT = 1 / 64
_MOST_DOUBT = 3 / 4
_RELIEF = 1 / 8
_MEASURING_INTERVAL = 512  # worthwhile drafts until a pause measures steps without the wait
_MEASURING_PAUSE = 6  # steps


class NodeBudget:
    """Cuts the trees of a step to the nodes whose verification is worth its time.

    Learns while the engine runs: the duration of a step by its tokens; the acceptance rate of nodes
    by predicted probability; the duration of drafting. Drafting pauses when speculation as a whole
    is not worth its time. Each pause is twice as long as the one before.

    Args:
        drafting_waits: Whether the host waits for the tokens of a step, where it drafts after it,
            and launches the next one at once elsewhere. Then the durations of steps include the
            wait, and what plain steps save by its absence is learned in pauses.
    """

    def __init__(self, drafting_waits: bool = False) -> None:
        self.drafting_waits = drafting_waits
        self.cost = StepCost()
        self.acceptance = AcceptanceCalibration()
        self._drafting_seconds = _FIRST_DRAFTING
        self._unwaited_share = 1.0  # duration of a plain step in a pause over that of others
        self._steps = 0
        self._pause = 0
        self._requests_at_pause = 0
        self._next_pause = 1
        self._drafts_since_measured = _MEASURING_INTERVAL - 16
        self._is_timed = True  # whether a step with drafts was timed since the last pause began
        self._doubt = 0.0

    def should_draft(self, num_requests: int) -> bool:
        """Return whether to draft for the next step; counts steps, and counts down a pause.

        Args:
            num_requests: Of the batch. A pause ends early when they are half or twice as many as at
                its beginning.
        """
        self._steps += 1
        if self._steps % _FADING_STEPS == 0:
            self.acceptance.fade()
        if self._pause and self._requests_at_pause < 2 * num_requests < 4 * self._requests_at_pause:
            self._pause -= 1
            return False
        self._pause = 0
        return True

    def least_probability(self, num_requests: int) -> float:
        """Return the predicted probability below which a node cannot be worth its time.

        A node is worth its time if it yields more than the step without drafts yields in the same
        time. A margin remains, because it is not known yet how many nodes the step will have.

        Args:
            num_requests: Those that get a token from the next step.
        """
        if not self.cost.known:
            return 0.0
        nodes = max(num_requests, _FEW_NODES)
        seconds = self._table(num_requests, nodes)[num_requests:]
        slope = ((seconds[1:] - seconds[0]) / np.arange(1, nodes + 1)).min()
        price = _MARGIN * num_requests / (self._unwaited_share * seconds[0]) * slope
        return self.acceptance.predicted_for(price)

    def cut(self, trees: Sequence[TokenTree], num_requests: int) -> list[TokenTree]:
        """Return the trees without the nodes that are not worth their time; set a pause.

        Trees without probabilities stay whole. All trees do until step costs are known. Without
        trees nobody may draft, as where all requests end, which says nothing about drafts.

        Args:
            trees: Of the next step.
            num_requests: Those that get a token from it, with or without a tree.
        """
        if not trees or not self.cost.known:
            return list(trees)
        predicted, open_to_cuts = [], []
        for i, tree in enumerate(trees):
            if tree.probabilities is not None and len(tree.probabilities):
                open_to_cuts.append(i)
                predicted.append(tree.probabilities)
        if not open_to_cuts:
            if not any(tree.num_nodes for tree in trees):
                self._set_pause(False, self.cost(num_requests), num_requests)
            return list(trees)
        num_open = sum(map(len, predicted))
        whole = sum(tree.num_nodes for tree in trees) - num_open
        seconds = self._table(num_requests, whole + num_open)[whole:]
        rates = self.acceptance(np.concatenate(predicted))
        keep, tokens_per_second = choose_nodes(rates, num_requests, seconds)
        plain = self._unwaited_share * seconds[num_requests]
        tokens_in_plain = tokens_per_second * plain / (1.0 + self._drafting_seconds / plain)
        # A tree that stays whole costs the drafting and the wait already.
        is_worthwhile = whole > 0 or tokens_in_plain > num_requests
        keep &= is_worthwhile
        self._set_pause(is_worthwhile, plain, num_requests)
        if keep.all():
            return list(trees)
        cut = list(trees)
        selected = select_all([trees[i] for i in open_to_cuts], keep)
        for i, tree in zip(open_to_cuts, selected, strict=True):
            cut[i] = tree
        return cut

    def expected_rates(self, trees: Sequence[TokenTree]) -> list[np.ndarray]:
        """Return the expected acceptance rate of each node, float [nodes] for each tree; 1 where
        the drafter gives no probabilities."""
        predicted = [tree.probabilities for tree in trees if tree.probabilities is not None]
        rates = self.acceptance(np.concatenate([[], *predicted]))
        parts = iter(np.split(rates, np.cumsum([len(part) for part in predicted])))
        return [
            np.ones(tree.num_nodes) if tree.probabilities is None else next(parts) for tree in trees
        ]

    def _table(self, num_requests: int, nodes: int) -> np.ndarray:
        """Return float64 [num_requests + nodes + 1], seconds by number of tokens, closer to those
        of `num_requests` tokens the larger the doubt."""
        seconds = self.cost.table(num_requests + nodes + 1)
        doubted: np.ndarray = seconds * (seconds[num_requests] / seconds) ** self._doubt
        return doubted

    def _set_pause(self, is_worthwhile: bool, plain_seconds: float, num_requests: int) -> None:
        if is_worthwhile:
            # One lucky draft does not end the caution, a few in a row do.
            self._next_pause = max(self._next_pause // _PAUSE_DIVISOR, 1)
            self._doubt = max(self._doubt - _RELIEF, 0.0)
            self._drafts_since_measured += 1
            if self.drafting_waits and self._drafts_since_measured >= _MEASURING_INTERVAL:
                self._pause, self._requests_at_pause = _MEASURING_PAUSE, num_requests
                self._drafts_since_measured = 0
            return
        self._doubt = min(self._doubt + _DOUBT, _MOST_DOUBT)
        if self.drafting_waits and not self._is_timed:
            # Costs may have changed in the pause. The next step is timed, unless it has prefills.
            self._is_timed = True
            return
        self._is_timed = False
        longest = _MAX_PAUSE
        if not self.drafting_waits:
            longest = min(int(_PAUSE_BY_COST * self._drafting_seconds / plain_seconds), _MAX_PAUSE)
        self._pause, self._requests_at_pause = min(self._next_pause, longest), num_requests
        self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)

    @property
    def pause(self) -> tuple[int, int, int]:
        """Steps of the pause that are left, requests at its beginning, and steps of the next."""
        return self._pause, self._requests_at_pause, self._next_pause

    @pause.setter
    def pause(self, pause: tuple[int, int, int]) -> None:
        self._pause, self._requests_at_pause, self._next_pause = pause

    def expect_wait(self, unwaited: float, waited: float) -> None:
        """Set a first estimate of what the wait costs where drafting waits.

        Args:
            unwaited, waited: Seconds of a step without it and with it. What steps were expected to
                take is without it.
        """
        self.cost.lengthen(max(waited - unwaited, 0.0))
        self._unwaited_share = min(unwaited / waited, 1.0)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in the measured duration of one decoding step without drafting."""
        self.cost.observe(num_tokens, seconds)
        self._is_timed = True

    def observe_unwaited(self, num_tokens: int, seconds: float) -> None:
        """Take in the duration of a decoding step in a pause, from its launch to the next one."""
        if self.cost.known and num_tokens:
            ratio = seconds / self.cost(num_tokens)
            self._unwaited_share = min(moved(self._unwaited_share, ratio), 1.0)
            self._drafts_since_measured = 0

    def observe_drafting(self, seconds: float) -> None:
        """Take in the duration of drafting for one step, including all overhead."""
        self._drafting_seconds = moved(self._drafting_seconds, seconds)

    def observe_verified(
        self, trees: Sequence[TokenTree], accepted: Sequence[Sequence[int]]
    ) -> None:
        """Take in the accepted nodes of a step's trees."""
        predicted: list[np.ndarray] = []
        indices: list[int] = []  # of accepted nodes
        num_nodes = 0
        for tree, path in zip(trees, accepted, strict=True):
            if tree.probabilities is None or not tree.num_nodes:
                continue
            predicted.append(tree.probabilities)
            indices += [num_nodes + node for node in path]
            num_nodes += tree.num_nodes
        if predicted:
            self.acceptance.observe(np.concatenate(predicted), np.array(indices, dtype=np.int64))
