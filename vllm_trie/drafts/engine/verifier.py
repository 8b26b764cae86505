"""Tree speculation over the steps of an engine, whatever runs its model.

:class:`TreeVerifier` owns what outlives a step, and a :class:`TreeStep` holds the rest. The steps
of :mod:`~vllm_trie.drafts.engine.runners.v1` and
:mod:`~vllm_trie.drafts.engine.runners.v2_adapter` show the order of its calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from vllm_trie.drafts import DraftRequest, PreparedDrafts
from vllm_trie.drafts.budget import DraftForecast, NodeBudget, planned_lengths
from vllm_trie.drafts.engine.guard import GuardedDrafter
from vllm_trie.drafts.engine.observers import StepObserver
from vllm_trie.drafts.engine.step_clock import StepClock
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.drafts.engine.verification.placement import QueryTokens, place_trees, scheduled_tree
from vllm_trie.hooks.wire import TreeStats, WaitCause
from vllm_trie.tree import TokenTree

ShareTrees = Callable[[list[TokenTree]], list[TokenTree]]
"""Returns rank 0's trees on every tensor-parallel rank."""

_MOST_PLAIN_ROWS = 16
"""A step without drafts has its rows of logits read for later ones, if they are no more. Reading
more would take over 1 % of a step on a GPU, by estimate."""


class EarlyDrafts(NamedTuple):
    """Drafts that the device has, before anything else was done with the tokens they follow."""

    prepared: PreparedDrafts
    requests: Mapping[int, DraftRequest]
    """Those they are for, by batch index, without their last step."""
    seconds: float
    """For which the device waited."""


class TreeVerifier:
    """Draft trees of an engine's requests: proposed, placed, verified, released.

    Args:
        guard: The drafter of this rank.
        budget: Chooses the nodes that are verified; ``None`` verifies all.
        share_trees: For several tensor-parallel ranks. They measure different times, so the
            budget's least probability is for one rank only, as are its pauses on Model Runner
            V1. On V2 all ranks pause with rank 0.
        observers: Told of each step.

    Attributes:
        clock: Of the engine's steps.
        forecast: Of the next drafts, where steps are launched ahead of them.
        step: The step that began last.
        stats: Statistics since they were last taken.
        totals: Those over the engine's lifetime.
    """

    def __init__(
        self,
        guard: GuardedDrafter,
        budget: NodeBudget | None = None,
        share_trees: ShareTrees | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.guard = guard
        self.budget = budget
        self.observers = observers
        self.forecast: DraftForecast | None = None
        self.step = TreeStep()
        self.totals = TreeStats()
        self.share_trees = share_trees
        self._stored_trees: dict[str, TokenTree] = {}  # proposed last, by request id
        # Drafts that a launched step has taken, and how many requests get a token from it.
        self._unjudged: tuple[Sequence[DraftRequest], list[TokenTree], int] | None = None
        self.clock = StepClock()
        self.stats = TreeStats()

    def begin_step(
        self,
        request_ids: Sequence[str],
        drafts: Mapping[str, Sequence[int]] | None,
        num_tokens: int,
        first_rows: Sequence[int],
        started: float,
        may_draft: bool = True,
    ) -> TreeStep:
        """Begin a step, with its drafts or ahead of them.

        Args:
            request_ids: Of the batch, in its order.
            drafts: See :meth:`take_drafts`, which follows where they are not known yet: None.
            num_tokens: Scheduled tokens of all requests.
            first_rows: Of the logits of each request, with the number of all rows behind them.
            started: When the step began, by ``time.perf_counter``.
            may_draft: Whether any request may have drafts after it, as all ranks say alike.
        """
        num_requests = len(request_ids)
        step = self.step = TreeStep(
            request_ids=request_ids,
            trees=[TokenTree.empty()] * num_requests,
            first_rows=first_rows,
            accepted=[()] * num_requests,
            num_decode_tokens=num_tokens if num_tokens == first_rows[-1] else 0,
            started=started,
            is_pausing=not may_draft,
            has_drafts=True,
        )
        if drafts is not None:
            self.take_drafts(step, drafts)
        return step

    def take_drafts(self, step: TreeStep, drafts: Mapping[str, Sequence[int]]) -> None:
        """Find the trees that a step's drafts stand for, and decide whether its batch is to get
        drafts.

        Args:
            step: Changed.
            drafts: Draft tokens by request id, as the scheduler sends them.
        """
        start = time.perf_counter()
        if self._unjudged is not None:
            self._judge(*self._unjudged)
            self._unjudged = None
        step.has_drafts = bool(drafts)
        step.is_pausing |= self.guard.is_off or (
            self.budget is not None
            and not self.budget.should_draft(len(step.request_ids))  # counts steps, so first
            and (self.share_trees is None or self.budget.drafting_waits)
        )
        if self.budget is not None and self.share_trees is None and not step.is_pausing:
            step.least_probability = self.budget.least_probability(len(step.request_ids))
        if drafts:
            step.trees = [
                scheduled_tree(self._stored_trees.get(request_id), drafts.get(request_id, ()))
                for request_id in step.request_ids
            ]
            self.stats.preparation_seconds += time.perf_counter() - start

    def place(
        self,
        step: TreeStep,
        tokens: QueryTokens,
        takes_chains: bool,
        trees: Sequence[TokenTree] | None = None,
    ) -> None:
        """Set the nodes' positions and the tree batch, see :func:`place_trees`.

        Args:
            step: Changed.
            tokens, takes_chains: See there.
            trees: The step's, with fillers where it has any.
        """
        start = time.perf_counter()
        placed = place_trees(trees or step.trees, tokens, takes_chains)
        step.tree_batch, step.places = placed
        self.stats.preparation_seconds += time.perf_counter() - start

    def reads_rows(self, step: TreeStep, num_rows: int) -> bool:
        """Return whether to read the step's rows of logits for the drafter."""
        is_cheap = step.has_drafts or (not step.is_pausing and num_rows <= _MOST_PLAIN_ROWS)
        return self.guard.drafter.needs_rows and is_cheap

    def accept(self, step: TreeStep, accepted: Sequence[Sequence[int]]) -> None:
        """Take in the accepted nodes of each request."""
        step.accepted = accepted
        if self.budget is not None and step.has_drafts:
            self.budget.observe_verified(step.trees, accepted)

    def end_step(self, step: TreeStep, new_tokens: Sequence[Sequence[int]]) -> None:
        """Take in the step's time and tokens, and drop its trees.

        Trees of requests outside the batch stay: the scheduler may still send their drafts.

        Args:
            step: Changed.
            new_tokens: Of each request of the batch; none while its prefill goes on.
        """
        start = time.perf_counter()
        if self.budget is not None and step.num_decode_tokens and step.ended:
            seconds = self.clock.stop(step.started, step.ended)
            self.budget.observe_step(step.num_decode_tokens, seconds)
        step.num_decoding = sum(map(bool, new_tokens))
        step.tree_batch = None  # a warm-up or an idle rank's run may come before the next step
        self.stats.steps += step.num_decoding
        self.stats.tokens += sum(map(len, new_tokens))
        for observer in self.observers:
            observer.ended(step, new_tokens, self.stats)
        for request_id in step.request_ids:
            self._stored_trees.pop(request_id, None)
        self.stats.bookkeeping_seconds += time.perf_counter() - start

    def count_wait(self, cause: WaitCause) -> None:
        """Count a wait for the device."""
        self.stats.waits[cause] = self.stats.waits.get(cause, 0) + 1

    def planned_lengths(self, places: Mapping[str, int]) -> dict[str, int]:
        """Return how many of its places each draft takes in a step that is launched ahead of them,
        by request id: as many as the last drafts are worth, one at least."""
        if self.budget is None or self.forecast is None:
            return dict(places)
        forecasts = [self.forecast(request_id)[:size] for request_id, size in places.items()]
        lengths = planned_lengths(forecasts, self.budget.cost)
        if not any(lengths):  # one place each, as waiting for drafts costs more
            lengths = [min(1, len(rates)) for rates in forecasts]
        return dict(zip(places, lengths, strict=True))

    def prepare(
        self, step: TreeStep, requests: Mapping[int, DraftRequest], num_new: int
    ) -> PreparedDrafts | None:
        """Prepare drafts after a step whose tokens are not there yet, see
        :meth:`GuardedDrafter.prepare`.

        Args:
            step: The one before them.
            requests: As they were before the step, by batch index.
            num_new: The most tokens that a request gets.
        """
        for request in requests.values():
            request.min_probability = step.least_probability
        return self.guard.prepare(list(requests.values()), list(requests), num_new)

    def draft(
        self,
        step: TreeStep,
        requests: Mapping[int, DraftRequest],
        sample_hidden_states: torch.Tensor | None,
        since: float,
        lengths: Mapping[str, int] | None = None,
        early: EarlyDrafts | None = None,
    ) -> list[list[int]]:
        """Draft the trees of the next step.

        Args:
            step: The one that ended.
            requests: Those that get a tree, by batch index.
            sample_hidden_states: [logits rows, hidden_size]; None where the drafter reads none.
            since: When drafting for this step began, by ``time.perf_counter``.
            lengths: Places for each draft in a step that is launched already, by request id.
            early: What the device has of them.

        Returns:
            The draft tokens of each request of the batch.
        """
        spent = self.guard.seconds
        for index, request in requests.items():
            if early is None:
                step.show(request, index)
            if sample_hidden_states is not None and self.guard.drafter.needs_hidden_states:
                request.hidden_state = sample_hidden_states[step.last_row(index)]
        drafts: list[list[int]] = [[] for _ in step.request_ids]
        trees = self._propose(step, list(requests.values()), lengths, early)
        for (index, request), tree in zip(requests.items(), trees, strict=True):
            if tree.num_nodes:
                self._stored_trees[request.request_id] = tree
                drafts[index] = tree.token_list.copy()  # vLLM may change its list
        drafting = self.guard.seconds - spent
        elapsed = time.perf_counter() - since
        self.stats.drafting_seconds += drafting + (early.seconds if early else 0.0)
        self.stats.bookkeeping_seconds += elapsed - drafting
        self.clock.leave_out(elapsed)
        if self.budget is not None and drafting:
            self.budget.observe_drafting(elapsed if early is None else early.seconds)
        return drafts

    def _propose(
        self,
        step: TreeStep,
        requests: list[DraftRequest],
        lengths: Mapping[str, int] | None,
        early: EarlyDrafts | None,
    ) -> list[TokenTree]:
        """Return the trees of some requests, cut to their places or by the budget, the same on all
        ranks."""
        for request in requests:
            request.min_probability = step.least_probability
        prepared = None if early is None else early.prepared
        proposed = self.guard.propose(requests, prepared) if requests else []
        if lengths is None:
            trees = self._judge(requests, proposed, step.num_decoding)
        else:
            # What the step has places for costs nothing more, and the device may wait for it: the
            # budget decides about the next drafts, later.
            pairs = zip(requests, proposed, strict=True)
            trees = [tree.prefix(lengths.get(request.request_id, 0)) for request, tree in pairs]
            self._unjudged = requests, proposed, step.num_decoding
        if self.observers:
            request_ids = [request.request_id for request in requests]
            drafts = dict(zip(request_ids, zip(proposed, trees, strict=True), strict=True))
            for observer in self.observers:
                observer.drafted(step.request_ids, drafts, self.guard.has_failed)
        return trees if self.share_trees is None else self.share_trees(trees)

    def _judge(
        self, requests: Sequence[DraftRequest], trees: list[TokenTree], num_decoding: int
    ) -> list[TokenTree]:
        """Return what the budget leaves of the trees; let it and the forecast learn from them.

        Args:
            requests: Of the trees.
            num_decoding: Requests that get a token from the next step.
        """
        if self.budget is None:
            return trees
        if self.forecast is not None:
            rates = self.budget.expected_rates(trees)
            request_ids = [request.request_id for request in requests]
            self.forecast.observe(dict(zip(request_ids, rates, strict=True)))
        return self.budget.cut(trees, num_decoding)

    def take_stats(self) -> TreeStats | None:
        """Return the statistics since the last call, if any request got tokens."""
        if not self.stats.steps:
            return None
        stats, self.stats = self.stats, TreeStats()
        stats.draft_failures = self.guard.take_new_failures()
        self.totals.add(stats)
        self.totals.of_requests.clear()
        return stats

    def forget_stats(self) -> None:
        """Forget the statistics so far."""
        self.take_stats()
        self.totals = TreeStats()

    def close(self) -> None:
        """Let observers finish; the engine ends."""
        for observer in self.observers:
            observer.closed()

    def release(self, request_id: str, ended: DraftRequest | None) -> None:
        """Forget a request that has ended, see :meth:`GuardedDrafter.release`."""
        self._stored_trees.pop(request_id, None)
        self.guard.release(request_id, ended)
        if self.forecast is not None:
            self.forecast.release(request_id)
        for observer in self.observers:
            observer.released(request_id)
