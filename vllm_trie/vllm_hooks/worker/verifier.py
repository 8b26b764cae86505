"""Tree speculation over the steps of an engine, whatever runs its model.

:class:`TreeVerifier` owns all state of tree speculation. The steps of
:mod:`~vllm_trie.vllm_hooks.worker.runners.v1` and
:mod:`~vllm_trie.vllm_hooks.worker.runners.v2_adapter` show the order of its calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_trie.attention import TreeBatch
from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import DraftRequest, LogitsRows, VerifiedStep
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.wire import TreeStats, WaitCause
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter
from vllm_trie.vllm_hooks.worker.recorder import TraceRecorder
from vllm_trie.vllm_hooks.worker.sharing import Sharing
from vllm_trie.vllm_hooks.worker.step_clock import StepClock
from vllm_trie.vllm_hooks.worker.verification import compaction
from vllm_trie.vllm_hooks.worker.verification.placement import (
    QueryTokens,
    place_trees,
    scheduled_tree,
)
from vllm_trie.vllm_hooks.worker.verification.sampling import (
    argmax_of_logits,
    is_plain_greedy,
    likeliest_of_logits,
    sample_greedy,
    sample_levels,
)
from vllm_trie.vllm_hooks.worker.warm_start import WarmStart

if TYPE_CHECKING:
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

ShareTrees = Callable[[list[TokenTree]], list[TokenTree]]
"""Returns rank 0's trees on every tensor-parallel rank."""

_NO_DRAFT = VerifiedStep(TokenTree.empty(), (), None)
_MOST_PLAIN_ROWS = 16
"""Of a step without drafts, whose rows of logits are read for later ones. By estimate, reading more
would take over 1 % of a step on a GPU."""


class TreeVerifier:
    """Draft trees of an engine's requests: proposed, placed, verified, released.

    Args:
        guard: The drafter of this rank.
        budget: Chooses the nodes that are verified; ``None`` verifies all.
        share_trees: For several tensor-parallel ranks. They measure different times, so the
            budget's least probabilities are for one rank only, as are its pauses on Model Runner
            V1. On V2 all ranks pause with rank 0.
        memories: Save and share what is learned.
        recorder: Writes the traces that requests ask for; ``None`` where the operator wants none.

    Attributes:
        step_trees: Trees of the step that runs, by batch index.
        tree_batch: Those of them that need tree attention.
        has_drafts: Whether the step that runs verifies drafts.
        is_pausing: Whether no drafts are wanted after the step that runs.
        num_decode_tokens: Tokens of the step that runs; 0 with prefills among them, as its duration
            cannot be attributed to nodes then.
        likeliest: Tokens and probabilities of the step's rows of logits, see
            :func:`likeliest_of_logits`; None where they are not read.
        totals: Statistics over the engine's lifetime.
    """

    def __init__(
        self,
        guard: GuardedDrafter,
        budget: NodeBudget | None = None,
        share_trees: ShareTrees | None = None,
        memories: Sequence[WarmStart | Sharing] = (),
        recorder: TraceRecorder | None = None,
    ) -> None:
        self.guard = guard
        self.budget = budget
        self.recorder = recorder
        self.step_trees: Sequence[TokenTree] = []
        self.tree_batch: TreeBatch | None = None
        self.has_drafts = False
        self.is_pausing = False
        self.likeliest: tuple[np.ndarray, np.ndarray] | None = None
        self.totals = TreeStats()
        self.share_trees = share_trees
        self._memories = memories
        # By request id: the tree proposed last, and the result of the last verification.
        self._stored_trees: dict[str, TokenTree] = {}
        self._last_steps: dict[str, VerifiedStep] = {}
        # Of the step that runs, by batch index.
        self._request_ids: Sequence[str] = []
        self._accepted: Sequence[Sequence[int]] = []
        self._first_rows: Sequence[int] = []
        self._last_logits_rows: Sequence[int] = []  # those that gave the bonus tokens
        self.num_decode_tokens = 0
        self._num_decoding = 0
        self._clock = StepClock()
        self._stats = TreeStats()

    def start_step(self, num_requests: int) -> None:
        """Start the step's clock and decide whether a batch of this size is to get drafts."""
        self._clock.start()
        self.is_pausing = (
            self.budget is not None
            and (self.share_trees is None or self.budget.drafting_waits)
            and not self.budget.should_draft(num_requests)
        )

    def begin_step(
        self, request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]], num_tokens: int
    ) -> None:
        """Find the trees that the scheduled drafts stand for.

        Args:
            request_ids: Of the batch, in its order.
            drafts: Draft tokens by request id, as the scheduler sends them.
            num_tokens: Scheduled tokens of all requests.
        """
        start = time.perf_counter()
        num_decode_tokens = len(request_ids) + sum(map(len, drafts.values()))
        self.num_decode_tokens = num_tokens if num_tokens == num_decode_tokens else 0
        self._request_ids = request_ids
        self.has_drafts = bool(drafts)
        self.likeliest = None
        self.tree_batch = None
        self.step_trees = [TokenTree.empty()] * len(request_ids)
        if drafts:
            self.step_trees = [
                scheduled_tree(self._stored_trees.get(request_id), drafts.get(request_id, ()))
                for request_id in request_ids
            ]
            self._stats.preparation_seconds += time.perf_counter() - start

    def place(
        self,
        tokens: QueryTokens,
        takes_chains: bool,
        trees: Sequence[TokenTree] | None = None,
    ) -> None:
        """Set the nodes' positions and the tree batch, see :func:`place_trees`.

        Args:
            tokens, takes_chains: See there.
            trees: ``step_trees``, with fillers where the step has any.
        """
        start = time.perf_counter()
        self.tree_batch = place_trees(trees or self.step_trees, tokens, takes_chains)
        self._stats.preparation_seconds += time.perf_counter() - start

    def verify(
        self,
        logits: torch.Tensor | None,
        sampler: Sampler,
        metadata: SamplingMetadata,
        outputs: Sequence[list[int]],
    ) -> SamplerOutput:
        """Sample the step's tokens: the accepted nodes' and one more for each request.

        Args:
            logits: [logits rows, vocab_size], ``N + 1`` rows for a request with N nodes.
            sampler: vLLM's.
            metadata: Of the batch.
            outputs: See :func:`sample_levels`.
        """
        start = time.perf_counter()
        trees = self.step_trees
        is_greedy = self.has_drafts and is_plain_greedy(metadata)
        argmax = self.read_logits(logits, sampler, is_greedy)
        if not self.has_drafts:
            self._keep_results([()] * len(trees), range(len(trees)), argmax)
            output: SamplerOutput = sampler(logits=logits, sampling_metadata=metadata)
            return output
        assert logits is not None
        first_rows = [0, *accumulate(len(tree.token_list) + 1 for tree in trees[:-1])]
        if is_greedy:
            assert argmax is not None
            sample = sample_greedy(argmax, trees)
        else:
            sample = sample_levels(sampler, logits, first_rows, trees, metadata, outputs)
        self._keep_results(sample.accepted, first_rows, argmax)
        output = sample.padded(logits.device)
        self._stats.verification_seconds += time.perf_counter() - start
        return output

    def read_logits(
        self, logits: torch.Tensor | None, sampler: Sampler, needs_argmax: bool = False
    ) -> np.ndarray | None:
        """Read what the drafter wants of a step's logits, before anything changes them.

        Returns:
            The argmax of each row; None if nobody needs it.
        """
        if logits is None:
            return None
        if self.reads_rows(len(logits)):
            self.likeliest = likeliest_of_logits(logits)
            if logits.device.type == "cpu":
                return self.likeliest[0][:, 0]
        if needs_argmax or self.guard.drafter.needs_node_argmax:
            return argmax_of_logits(sampler, logits)
        return None

    def reads_rows(self, num_rows: int) -> bool:
        """Return whether to read the step's rows of logits for the drafter."""
        is_cheap = self.has_drafts or (not self.is_pausing and num_rows <= _MOST_PLAIN_ROWS)
        return self.guard.drafter.needs_rows and is_cheap

    def observe_outputs(
        self, new_tokens: Sequence[Sequence[int]], argmax: np.ndarray | None = None
    ) -> None:
        """Take in what was accepted of the step's drafts, as the output tokens show it.

        Args:
            new_tokens: Of each request of the batch: the accepted ones and one more; none while its
                prefill goes on.
            argmax: Of every logits row, ``N + 1`` for a request with N nodes, where it is known.
        """
        accepted = [
            tree.path_of(tokens[:-1])
            for tree, tokens in zip(self.step_trees, new_tokens, strict=True)
        ]
        first_rows = [0, *accumulate(len(tree.token_list) + 1 for tree in self.step_trees[:-1])]
        self._keep_results(accepted, first_rows, argmax)

    def _keep_results(
        self,
        accepted: Sequence[Sequence[int]],
        first_rows: Sequence[int],
        argmax: np.ndarray | None,
    ) -> None:
        """Keep each request's accepted nodes, and the argmax of its logits for the drafter."""
        self._accepted, self._first_rows = accepted, first_rows
        self._last_logits_rows = [
            first + (path[-1] + 1 if path else 0)
            for first, path in zip(first_rows, accepted, strict=True)
        ]
        if self.budget is not None and self.has_drafts:
            self.budget.observe_verified(self._request_ids, self.step_trees, accepted)
        predictions = self.guard.predictions
        for request_id, counts in predictions.observe(
            self._request_ids, self.step_trees, accepted
        ).items():
            self._stats.accepted_prediction_tokens += counts.accepted
            self._stats.rejected_prediction_tokens += counts.rejected
            self._stats.count_prediction(request_id, *counts)
        argmax_rows: np.ndarray | None = None
        if argmax is not None and self.guard.drafter.needs_node_argmax:
            argmax_rows = np.asarray(argmax, dtype=np.int32)
        if argmax_rows is None and not self.has_drafts:
            self._last_steps.update(dict.fromkeys(self._request_ids, _NO_DRAFT))
            return
        for request_id, tree, path, first in zip(
            self._request_ids, self.step_trees, accepted, first_rows, strict=True
        ):
            node_argmax = (
                None if argmax_rows is None else argmax_rows[first : first + tree.num_nodes + 1]
            )
            self._last_steps[request_id] = VerifiedStep(tree, tuple(path), node_argmax)

    def compact(
        self, groups: Sequence[compaction.CacheGroup], slot_mappings: Sequence[torch.Tensor]
    ) -> None:
        """Move the accepted nodes' KV into place, see :func:`compaction.compact`."""
        if self.tree_batch is None:
            return
        start = time.perf_counter()
        moves = compaction.moved_tokens(self.tree_batch.rows, self._accepted)
        compaction.compact(groups, slot_mappings, *moves)
        self._stats.verification_seconds += time.perf_counter() - start

    def last_step(self, request_id: str) -> VerifiedStep:
        """Return the result of a request's last verification; no nodes before the first."""
        return self._last_steps.get(request_id, _NO_DRAFT)

    def end_step(self, new_tokens: Sequence[Sequence[int]], is_timed: bool = True) -> None:
        """Take in the step's time and tokens, and drop its trees.

        Trees of requests outside the batch stay: the scheduler may still send their drafts.

        Args:
            new_tokens: Of each request of the batch; none while its prefill goes on.
            is_timed: Whether the time since the step's beginning is its duration.
        """
        start = time.perf_counter()
        if self.budget is not None and self.num_decode_tokens and is_timed:
            self.budget.observe_step(self.num_decode_tokens, self._clock.stop())
        self._num_decoding = sum(map(bool, new_tokens))
        self.tree_batch = None  # a warm-up or an idle rank's run may come before the next step
        self._count(self._request_ids, new_tokens)
        self._stats.bookkeeping_seconds += time.perf_counter() - start

    def take_in(self, new_tokens: Mapping[str, Sequence[int]]) -> None:
        """Take in the tokens of an earlier step, which verified no drafts, by request id."""
        self._last_steps.update(dict.fromkeys(new_tokens, _NO_DRAFT))
        self._count([*new_tokens], [*new_tokens.values()])

    def _count(self, request_ids: Sequence[str], new_tokens: Sequence[Sequence[int]]) -> None:
        """Count and record the tokens of a step, and drop its trees."""
        self._stats.steps += sum(map(bool, new_tokens))
        self._stats.tokens += sum(map(len, new_tokens))
        if self.recorder is not None:
            self.recorder.record(request_ids, self._last_steps, new_tokens)
        for request_id in request_ids:
            self._stored_trees.pop(request_id, None)

    def count_wait(self, cause: WaitCause) -> None:
        """Count a wait for the device."""
        self._stats.waits[cause] = self._stats.waits.get(cause, 0) + 1

    def draft(
        self,
        requests: Mapping[int, DraftRequest],
        num_requests: int,
        sample_hidden_states: torch.Tensor,
        since: float,
    ) -> list[list[int]]:
        """Draft the trees of the next step.

        Args:
            requests: Those that get a tree, by batch index.
            num_requests: In the batch.
            sample_hidden_states: [logits rows, hidden_size].
            since: When the requests began to be read, by ``time.perf_counter``.

        Returns:
            The draft tokens of each request of the batch.
        """
        spent = self.guard.seconds
        takes_hidden_states = self.guard.drafter.needs_hidden_states
        for index, request in requests.items():
            request.last_step = self._last_steps.get(request.request_id)
            request.rows = self._rows_of(index)
            if takes_hidden_states:
                request.hidden_state = sample_hidden_states[self._last_logits_rows[index]]
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        trees = self._propose(list(requests.values()))
        for (index, request), tree in zip(requests.items(), trees, strict=True):
            if tree.num_nodes:
                self._stored_trees[request.request_id] = tree
                drafts[index] = tree.token_list.copy()  # vLLM may change its list
        drafting = self.guard.seconds - spent
        elapsed = time.perf_counter() - since
        self._stats.drafting_seconds += drafting
        self._stats.bookkeeping_seconds += elapsed - drafting
        self._clock.leave_out(elapsed)
        if self.budget is not None and drafting:
            self.budget.observe_drafting(elapsed)
        return drafts

    def _rows_of(self, index: int) -> LogitsRows | None:
        """Return the step's rows of logits of a request, by its index in the batch."""
        if self.likeliest is None:
            return None
        tree, first = self.step_trees[index], self._first_rows[index]
        tokens, rates = (array[first : first + tree.num_nodes + 1] for array in self.likeliest)
        return LogitsRows(tree, tuple(self._accepted[index]), tokens, rates)

    def _propose(self, requests: list[DraftRequest]) -> list[TokenTree]:
        """Return the trees of some requests, cut by the budget, the same on all ranks."""
        request_ids = [request.request_id for request in requests]
        if self.budget is not None and self.share_trees is None:
            least = self.budget.least_probabilities(request_ids, self._num_decoding)
            for request, probability in zip(requests, least, strict=True):
                request.min_probability = probability
        proposed = trees = self.guard.propose(requests) if requests else []
        if self.budget is not None:
            trees = self.budget.cut(request_ids, trees, self._num_decoding)
        if self.recorder is not None:
            drafts = dict(zip(request_ids, zip(proposed, trees, strict=True), strict=True))
            self.recorder.observe_drafts(self._request_ids, drafts, self.guard.has_failed)
        return trees if self.share_trees is None else self.share_trees(trees)

    def take_stats(self) -> TreeStats | None:
        """Return the statistics since the last call, if any request got tokens; end the step."""
        stats = None
        if self._stats.steps:
            stats, self._stats = self._stats, TreeStats()
            stats.draft_failures = self.guard.take_new_failures()
            self.totals.add(stats)
            self.totals.predictions.clear()
            for memory in self._memories:
                memory.tick()
        self._clock.leave()
        return stats

    def close(self) -> None:
        """Save what was learned; the engine ends."""
        if self._memories:
            # The scheduler tells of ended requests with the next step, and there is none.
            for request_id in list(self._last_steps):
                self.release(request_id)
        for memory in self._memories:
            memory.close()

    def reset_drafts(self) -> None:
        """Forget what ended requests left; running ones keep their drafts."""
        self.guard.drafter.reset()

    def release(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._stored_trees.pop(request_id, None)
        self._last_steps.pop(request_id, None)
        self.guard.release(request_id)
        if self.recorder is not None:
            self.recorder.end(request_id)
        if self.budget is not None:
            self.budget.release(request_id)
