"""Tree verification in vLLM's Model Runner V1, as a mixin in front of the runner's class.

One step, in the order in which vLLM calls the overridden methods:

1. ``_prepare_inputs``: positions of the tree's nodes follow their depth; slots stay flat.
2. ``_build_attention_metadata``: the trees ride along to the attention backend.
3. ``_sample``: the lossless walk, then the accepted nodes' KV moves to its final slots.
4. ``propose_draft_token_ids``: the drafter fills the trees of the next step.
5. ``sample_tokens``: the step's statistics ride along to the scheduler.

A step without drafts goes vLLM's way without speculation as far as it can: on a small model what
vLLM does for drafts that are not there would be a noticeable part of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_trie.attention import TreeBatch
from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import DraftRequest, VerifiedStep
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.setup.support import check_layers
from vllm_trie.vllm_hooks.worker.drafting import tree_exchange
from vllm_trie.vllm_hooks.worker.drafting.guard import GuardedDrafter
from vllm_trie.vllm_hooks.worker.drafting.requests import draft_requests
from vllm_trie.vllm_hooks.worker.stats import STATS_ATTRIBUTE, TreeStats
from vllm_trie.vllm_hooks.worker.step_clock import StepClock
from vllm_trie.vllm_hooks.worker.verification import compaction
from vllm_trie.vllm_hooks.worker.verification.pending_tree import (
    EMPTY_TREE,
    TREE_ATTRIBUTE,
    PendingTree,
    trees_of_step,
)
from vllm_trie.vllm_hooks.worker.verification.placement import logits_metadata, place_trees
from vllm_trie.vllm_hooks.worker.verification.sampling import (
    argmax_of_rows,
    is_plain_greedy,
    sample_greedy,
    sample_levels,
)

_NO_DRAFT = VerifiedStep(EMPTY_TREE.tree, (), None)


class TreeRunnerMixin:
    """Overrides of ``GPUModelRunner`` (and of the CPU runner that derives from it)."""

    def init_trees(self) -> None:
        """Set up the mixin's state; called once, on a runner that was just constructed."""
        # By request id: the tree that was proposed last, and what its verification found.
        self._stored_trees: dict[str, PendingTree] = {}
        self._last_steps: dict[str, VerifiedStep] = {}
        # Of the step that runs, by batch row: its tree, and the row of logits that its bonus token
        # was sampled from.
        self._step_trees: list[PendingTree] = []
        self._last_rows: Sequence[int] = []
        self._tree_batch: TreeBatch | None = None
        self._has_drafts = False
        self._is_pausing = False
        """Whether no drafts are wanted after the step that runs."""
        self._cache_groups: list[compaction.CacheGroup] | None = None
        self._clock = StepClock()
        self._decode_tokens = 0
        """Tokens of the step, 0 if it prefills too: its time says nothing of nodes then."""
        self._tree_stats = TreeStats()
        self.tree_totals = TreeStats()
        """Sums over the engine's lifetime, of steps that are reported."""

    @property
    def _budget(self) -> NodeBudget | None:
        return self.drafter.node_budget

    @property
    def _guarded(self) -> GuardedDrafter:
        return self.drafter.guarded

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        check_layers(self.vllm_config, self.compilation_config.static_forward_context)

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self._stored_trees.pop(req_id, None)
        self._last_steps.pop(req_id, None)
        self._guarded.release(req_id)
        if self._budget is not None:
            self._budget.release(req_id)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # Limits are kept per request; vLLM's answer is for the whole batch, so that one request
        # near the length limit would cost every other one its drafts.
        return True

    # -- 1. inputs -----------------------------------------------------------------------------

    def _without_speculation(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of vLLM's that would do more if the engine speculates."""
        config, self.speculative_config = self.speculative_config, None
        try:
            return method(*args, **kwargs)
        finally:
            self.speculative_config = config

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.start()
        self._is_pausing = not self._is_drafting()
        return super().execute_model(*args, **kwargs)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_requests = self.input_batch.num_reqs
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self._has_drafts = bool(drafts)
        decoding = num_requests + sum(map(len, drafts.values()))
        self._decode_tokens = num_tokens if num_tokens == decoding else 0
        if not drafts:
            self._step_trees = [EMPTY_TREE] * num_requests
            self._tree_batch = None
            return self._without_speculation(
                super()._prepare_inputs, scheduler_output, num_scheduled_tokens
            )
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        start = time.perf_counter()
        self._step_trees = trees_of_step(
            self._stored_trees, drafts, self.input_batch.req_id_to_index, num_requests
        )
        self._tree_batch = place_trees(self, self._step_trees, num_scheduled_tokens, num_tokens)
        self._tree_stats.preparation_seconds += time.perf_counter() - start
        return prepared

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_drafts:
            return super()._preprocess(*args, **kwargs)
        return self._without_speculation(super()._preprocess, *args, **kwargs)

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        return logits_metadata(num_draft_tokens, cu_num_scheduled_tokens, self.device)

    # -- 2. attention --------------------------------------------------------------------------

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if self._tree_batch is not None:
            for layer_metadata in {id(m): m for m in metadata.values()}.values():
                setattr(layer_metadata, TREE_ATTRIBUTE, self._tree_batch)
        return metadata, common

    # -- 3. verification -----------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        trees = self._step_trees
        sampling_metadata = self.input_batch.sampling_metadata
        if not self._has_drafts:
            self._last_rows = range(len(trees))
            if self._guarded.drafter.needs_node_argmax:
                self._remember_steps([()] * len(trees), self._last_rows, logits)
            else:
                self._last_steps.update(dict.fromkeys(self.input_batch.req_ids, _NO_DRAFT))
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)

        start = time.perf_counter()
        base = [0] * len(trees)
        for index in range(1, len(trees)):
            base[index] = base[index - 1] + len(trees[index - 1].token_ids) + 1
        argmax = None
        if is_plain_greedy(sampling_metadata):
            argmax = argmax_of_rows(self.sampler, logits)
            sample = sample_greedy(argmax, base, trees)
        else:
            sample = sample_levels(self.sampler, logits, base, trees, sampling_metadata)
        self._last_rows = [
            row + (path[-1] + 1 if path else 0)
            for row, path in zip(base, sample.accepted, strict=True)
        ]
        self._remember_steps(sample.accepted, base, logits, argmax)
        self._compact(sample.accepted)
        if self._budget is not None:
            self._budget.observe_verified(
                self.input_batch.req_ids, [tree.tree for tree in trees], sample.accepted
            )
        output = sample.padded(logits.device)
        self._tree_stats.verification_seconds += time.perf_counter() - start
        return output

    def _remember_steps(
        self,
        accepted: Sequence[Sequence[int]],
        base: Sequence[int],
        logits: torch.Tensor | None,
        argmax: list[int] | None = None,
    ) -> None:
        """Keep what the drafters are told about the verification of each request.

        Args:
            accepted: accepted node indices of each batch row.
            base: first row of logits of each batch row.
            logits: [rows of logits, vocab_size].
            argmax: of each row of logits, if it is known.
        """
        wants_argmax = self._guarded.drafter.needs_node_argmax and logits is not None
        if wants_argmax and argmax is None:
            argmax = argmax_of_rows(self.sampler, logits)
        for index, request_id in enumerate(self.input_batch.req_ids):
            tree = self._step_trees[index].tree
            node_argmax = None
            if wants_argmax:
                first = base[index]
                node_argmax = np.array(argmax[first : first + tree.num_nodes + 1], dtype=np.int32)
            self._last_steps[request_id] = VerifiedStep(tree, tuple(accepted[index]), node_argmax)

    def _compact(self, accepted: Sequence[Sequence[int]]) -> None:
        """Move the accepted nodes' KV into place before anything else reads the cache."""
        if self._tree_batch is None:
            return
        sources, targets = compaction.moved_rows(self._tree_batch.rows, accepted)
        if not sources:
            return
        if self._cache_groups is None:
            self._cache_groups = compaction.cache_groups(
                self.kv_cache_config, self.compilation_config.static_forward_context
            )
        tables = self.input_batch.block_table
        slot_mappings = [tables[group.index].slot_mapping.gpu for group in self._cache_groups]
        compaction.compact(self._cache_groups, slot_mappings, sources, targets)

    # -- 4. drafting ---------------------------------------------------------------------------

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        *unused: Any,
        **unused_too: Any,
    ) -> list[list[int]]:
        start = time.perf_counter()
        before = self._guarded.seconds
        num_rows = self._end_step(sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not self._is_pausing:  # a patched vLLM asks all the same
            max_nodes = scheduler_output.num_spec_tokens_to_schedule
            requests = draft_requests(self, sampled_token_ids, max_nodes, self._last_steps)
            if self._guarded.drafter.needs_hidden_states:
                for row, request in requests.items():
                    request.hidden_state = sample_hidden_states[self._last_rows[row]]
            trees = self._draft(list(requests.values()), num_rows)
            for (row, request), tree in zip(requests.items(), trees, strict=True):
                if tree.num_nodes:
                    pending = PendingTree.of(tree)
                    self._stored_trees[request.request_id] = pending
                    drafts[row] = pending.token_ids
        drafting = self._guarded.seconds - before
        elapsed = time.perf_counter() - start
        self._tree_stats.drafting_seconds += drafting
        self._tree_stats.bookkeeping_seconds += elapsed - drafting
        if self._budget is not None and drafting:
            self._budget.observe_drafting(elapsed)
        return drafts

    def _end_step(self, new_tokens: Sequence[Sequence[int]]) -> int:
        """Take in the step's time and tokens, and drop its trees, whose drafts have been verified.

        Trees of requests outside the batch stay, the scheduler may still send their drafts.

        Args:
            new_tokens: of each batch row; none if its prefill goes on.

        Returns:
            How many requests got tokens.
        """
        if self._budget is not None and self._decode_tokens:
            num_requests = len(self._step_trees)
            self._budget.observe_step(num_requests, self._decode_tokens, self._clock.stop())
        num_rows = sum(map(bool, new_tokens))
        self._tree_stats.steps += num_rows
        self._tree_stats.tokens += sum(map(len, new_tokens))
        for request_id in self.input_batch.req_ids:
            self._stored_trees.pop(request_id, None)
        return num_rows

    def _is_drafting(self) -> bool:
        """Whether the step after the one that begins may have drafts; counts down a pause."""
        # Ranks measure different times: only rank 0's choice counts, and all draft at every step.
        alone = self.parallel_config.tensor_parallel_size == 1
        return (
            self._budget is None
            or not alone
            or self._budget.should_draft(self.input_batch.num_reqs)
        )

    def _draft(self, requests: list[DraftRequest], num_rows: int) -> list[TokenTree]:
        """The trees of the next step, the same on all ranks.

        Args:
            requests: those that shall get a tree.
            num_rows: requests that the next step decodes, with or without a tree.
        """
        alone = self.parallel_config.tensor_parallel_size == 1
        request_ids = [request.request_id for request in requests]
        if self._budget is not None and alone:  # ranks measure different times
            least = self._budget.least_probabilities(request_ids, num_rows)
            for request, probability in zip(requests, least, strict=True):
                request.min_probability = probability
        trees = self._guarded.propose(requests) if requests else []
        if self._budget is not None:
            trees = self._budget.cut(request_ids, trees, num_rows)
        if alone:
            return trees
        return tree_exchange.same_on_all_ranks(trees)

    # -- 5. statistics -------------------------------------------------------------------------

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self._is_pausing:
            output = self._without_speculation(super().sample_tokens, grammar_output)
            new_tokens = getattr(output, "sampled_token_ids", None)
            if new_tokens:
                self._end_step(new_tokens)
        else:
            output = super().sample_tokens(grammar_output)
        if self._tree_stats.steps:
            self._tree_stats.draft_failures = self._guarded.take_new_failures()
            setattr(output, STATS_ATTRIBUTE, self._tree_stats)
            self.tree_totals.add(self._tree_stats)
            self._tree_stats = TreeStats()
        self._clock.leave()
        return output


def add_trees(runner: Any) -> None:
    """Put the mixin in front of the runner's class; does nothing if it is there already."""
    cls = type(runner)
    if issubclass(cls, TreeRunnerMixin):
        return
    runner.__class__ = type(f"Tree{cls.__name__}", (TreeRunnerMixin, cls), {})
    runner.init_trees()
