"""The adaptive node budget: verifies as many nodes as speed decoding up, down to none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_trie.budget.acceptance import AcceptanceCalibration
from vllm_trie.budget.allocation import choose_nodes
from vllm_trie.budget.step_cost import StepCost
from vllm_trie.tree import TokenTree, select_all

_MAX_PAUSE = 64  # steps
_PAUSE_DIVISOR = 4  # of the next pause, for each draft that is worth its time
# Verified nodes are counted together, as one call costs the same for many.
_BATCH = 256  # nodes
_BATCH_STEPS = 8
_DECAY = 0.9  # of a request's statistics, each step
_PRIOR_TOKENS = 1.0  # predicted and accepted tokens that a request's statistics start with
_MAX_FACTOR = 1.5
# Statistics lose weight at intervals, or rejected nodes would never be verified again on another
# text: nodes that are not verified teach nothing.
_FADING_STEPS = 64
_FADING = 0.94  # of the acceptance rates
_COST_FADING = 0.98  # of what sizes that are not measured cost more than smaller ones
_REQUEST_FADING = 0.5  # of each request's statistics
_CHEAP = 0.01  # share of a plain step below which the time of rejected drafts does not matter
_GAIN_RATE = 0.1  # share of the newest pause step in what such steps save
_LONGEST = 2.0  # times the expected duration that such a step counts for at most
_LEAST_SHARE = 0.2  # of a step's duration with the wait that a plain step takes at least
_MARGIN = 0.5  # of a node's minimum gain, for the minimum probability that drafters get
_USUAL_NODES = 4  # a request
_FEW_NODES = 32  # a step


@dataclass(slots=True)
class _RequestStatistics:
    """Decaying sums over the verified steps of a request.

    Attributes:
        expected, accepted: tokens.
        in_flight: Expected accepted tokens of the tree that is being verified.
    """

    expected: float = 0.0
    accepted: float = 0.0
    in_flight: float = 0.0

    @property
    def factor(self) -> float:
        """Acceptance of this request's nodes relative to others of the same probability."""
        ratio = (self.accepted + _PRIOR_TOKENS) / (self.expected + _PRIOR_TOKENS)
        return min(ratio, _MAX_FACTOR)


class NodeBudget:
    """Cuts the trees of a step to the nodes whose verification is worth its time.

    Learns while the engine runs: the duration of a step by its tokens; the acceptance
    rate of nodes by predicted probability, over all requests and for each of them; the duration of
    drafting. Drafting pauses when speculation as a whole is not worth its time. Each pause is twice
    as long as the one before.

    Attributes:
        drafting_waits: Whether the host waits for the tokens of a step, where it drafts after it,
            and launches the next one at once elsewhere. Then the durations of steps include the
            wait, and what plain steps save by its absence is learned in pauses.
    """

    drafting_waits = False

    def __init__(self) -> None:
        self.cost = StepCost()
        self.acceptance = AcceptanceCalibration()
        self._requests: dict[str, _RequestStatistics] = {}
        # Verified nodes that are not counted yet: probabilities, indices of the accepted, number.
        self._predicted: list[np.ndarray] = []
        self._accepted: list[int] = []
        self._num_verified = 0
        self._num_uncounted = 0  # steps that these nodes are of
        self._drafting_seconds = 0.0
        self._unwaited_gain = 0.0  # seconds that a plain step saves in a pause
        self._steps = 0
        self._pause = 0
        self._rows_at_pause = 0
        self._next_pause = 1

    def should_draft(self, num_rows: int) -> bool:
        """Return whether to draft for the next step; counts steps, and counts down a pause.

        Args:
            num_rows: Requests in the batch. A pause ends early when they are half or twice as many
                as at its beginning.
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
        """Return the predicted probability below which a node cannot be worth its time.

        A node is worth its time if it yields more than the step without drafts yields in the same
        time. A margin remains, because it is not known yet how many nodes the step will have.

        Args:
            request_ids: Requests that will be drafted for.
            num_rows: Requests that get a token from the next step.
        """
        if not self.cost.known:
            return [0.0] * len(request_ids)
        nodes = max(_USUAL_NODES * num_rows, _FEW_NODES)
        seconds = self.cost.table(num_rows + nodes + 1)
        slope = (seconds[num_rows + nodes] - seconds[num_rows]) / nodes
        price = _MARGIN * num_rows / self._plain(seconds[num_rows]) * slope
        requests = [self._requests.get(request_id) for request_id in request_ids]
        factors = np.array([1.0 if request is None else request.factor for request in requests])
        least: list[float] = self.acceptance.predicted_for(price / factors).tolist()
        return least

    def cut(
        self, request_ids: Sequence[str], trees: Sequence[TokenTree], num_rows: int
    ) -> list[TokenTree]:
        """Return the trees without the nodes that are not worth their time.

        Trees without probabilities stay whole. All trees do until step costs are known. `num_rows`
        requests, with or without a tree, get a token from the next step.
        """
        predicted, open_to_cuts = [], []
        for i, tree in enumerate(trees):
            if tree.probabilities is not None and len(tree.probabilities):
                open_to_cuts.append(i)
                predicted.append(tree.probabilities)
        if not self.cost.known:
            return list(trees)
        if not open_to_cuts:
            if self.drafting_waits and num_rows and not any(tree.num_nodes for tree in trees):
                self._set_pause(False, self.cost(num_rows), num_rows)
            return list(trees)
        sizes = list(map(len, predicted))
        whole = sum(tree.num_nodes for tree in trees) - sum(sizes)
        requests = [
            self._requests.setdefault(request_ids[i], _RequestStatistics()) for i in open_to_cuts
        ]
        size = num_rows + whole + sum(sizes) + 1
        seconds = self.cost.table(size)[whole:]
        factors = [request.factor for request in requests]
        choice = choose_nodes(predicted, factors, self.acceptance.points(), num_rows, seconds)
        plain = self._plain(seconds[num_rows])
        is_worthwhile = choice.tokens_per_second * plain > num_rows * (
            1.0 + self._drafting_seconds / plain
        )
        keep = choice.keep if is_worthwhile else np.zeros_like(choice.keep)
        for request, expected in zip(requests, choice.expected, strict=True):
            request.in_flight = expected if is_worthwhile else 0.0
        self._set_pause(is_worthwhile or whole > 0, plain, num_rows)
        if keep.all():
            return list(trees)
        cut = list(trees)
        selected = select_all([trees[i] for i in open_to_cuts], keep)
        for i, tree in zip(open_to_cuts, selected, strict=True):
            cut[i] = tree
        return cut

    def _set_pause(self, is_worthwhile: bool, plain_seconds: float, num_rows: int) -> None:
        if is_worthwhile:
            # One lucky draft does not end the caution, a few in a row do.
            self._next_pause = max(self._next_pause // _PAUSE_DIVISOR, 1)
        elif self.drafting_waits or self._drafting_seconds > _CHEAP * plain_seconds:
            self._pause, self._rows_at_pause = self._next_pause, num_rows
            self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)

    @property
    def pause(self) -> tuple[int, int, int]:
        """Steps of the pause that are left, requests at its beginning, and steps of the next."""
        return self._pause, self._rows_at_pause, self._next_pause

    @pause.setter
    def pause(self, pause: tuple[int, int, int]) -> None:
        self._pause, self._rows_at_pause, self._next_pause = pause

    def _plain(self, seconds: float) -> float:
        """Return the duration of a step without drafts, of those where it is waited for."""
        return max(seconds - self._unwaited_gain, _LEAST_SHARE * seconds)

    def expect_step(self, num_tokens: int, seconds: float) -> None:
        """Set a first estimate of the duration of a step with `num_tokens` tokens."""
        self.cost.expect(num_tokens, seconds)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take in the measured duration of one decoding step without drafting."""
        self.cost.observe(num_tokens, seconds)

    def observe_unwaited(self, num_tokens: int, seconds: float) -> None:
        """Take in the duration of a decoding step in a pause, from its launch to the next one."""
        if self.cost.known and num_tokens:
            expected = self.cost(num_tokens)
            gain = expected - min(seconds, _LONGEST * expected)
            self._unwaited_gain += _GAIN_RATE * (gain - self._unwaited_gain)

    def observe_drafting(self, seconds: float) -> None:
        """Take in the duration of drafting for one step, including all overhead."""
        self._drafting_seconds += 0.05 * (seconds - self._drafting_seconds)

    def observe_verified(
        self,
        request_ids: Sequence[str],
        trees: Sequence[TokenTree],
        accepted: Sequence[Sequence[int]],
    ) -> None:
        """Take in the accepted nodes of a step's trees."""
        for request_id, tree, path in zip(request_ids, trees, accepted, strict=True):
            if tree.probabilities is None or not tree.num_nodes:
                continue
            request = self._requests.get(request_id)
            if request is not None:
                request.expected = _DECAY * request.expected + request.in_flight
                request.accepted = _DECAY * request.accepted + len(path)
            self._predicted.append(tree.probabilities)
            self._accepted += [self._num_verified + node for node in path]
            self._num_verified += tree.num_nodes
        self._num_uncounted += 1
        if self._num_verified >= _BATCH and self._num_uncounted >= _BATCH_STEPS:
            self.acceptance.observe(
                np.concatenate(self._predicted), np.array(self._accepted, dtype=np.int64)
            )
            self._predicted, self._accepted = [], []
            self._num_verified = self._num_uncounted = 0

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._requests.pop(request_id, None)

    def _fade(self) -> None:
        self.acceptance.fade(_FADING)
        self.cost.fade(_COST_FADING)
        for request in self._requests.values():
            request.expected *= _REQUEST_FADING
            request.accepted *= _REQUEST_FADING
