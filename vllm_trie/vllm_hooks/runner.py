"""Tree verification in vLLM's Model Runner V1, as a mixin in front of the runner's class.

One step, in the order in which vLLM calls the overridden methods:

1. ``_prepare_inputs``: positions of the tree's nodes follow their depth; slots stay flat.
2. ``_build_attention_metadata``: the trees ride along to the attention backend.
3. ``_sample``: the lossless walk, then the accepted nodes' KV moves to its final slots.
4. ``propose_draft_token_ids``: the drafter fills the trees of the next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_trie.attention import TreeBatch, TreeRow, build_tree_batch, prefers_chains
from vllm_trie.budget import NodeBudget
from vllm_trie.drafters import DraftRequest, VerifiedStep
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks import compaction, tree_exchange
from vllm_trie.vllm_hooks.drafting import GuardedDrafter
from vllm_trie.vllm_hooks.eligibility import drafting_limits
from vllm_trie.vllm_hooks.sampling import (
    TreeSample,
    argmax_of_rows,
    is_plain_greedy,
    sample_greedy,
    sample_levels,
)
from vllm_trie.vllm_hooks.stats import STATS_ATTRIBUTE, TreeStats
from vllm_trie.vllm_hooks.step import PendingTree, trees_of_step
from vllm_trie.vllm_hooks.step_clock import StepClock

TREE_ATTRIBUTE = "draft_trees"
"""Attribute of the attention metadata that carries the step's :class:`TreeBatch`."""


class TreeRunnerMixin:
    """Overrides of ``GPUModelRunner`` (and of the CPU runner that derives from it)."""

    def init_trees(self) -> None:
        """Set up the mixin's state; called once, on a runner that was just constructed."""
        self._stored_trees: dict[str, PendingTree] = {}
        self._last_steps: dict[str, VerifiedStep] = {}
        self._step_trees: list[PendingTree] = []
        self._tree_batch: TreeBatch | None = None
        self._last_rows: list[int] = []
        self._tree_stats = TreeStats()
        self.tree_totals = TreeStats()
        """Sums over the engine's lifetime, of steps that are reported."""
        self._reported_failures: dict[str, int] = {}
        self._cache_groups: list[compaction.CacheGroup] | None = None
        self._clock = StepClock()
        self._decode_tokens = 0

    @property
    def _budget(self) -> NodeBudget | None:
        return self.drafter.node_budget

    @property
    def _guarded(self) -> GuardedDrafter:
        return self.drafter.guarded

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        layers = self.compilation_config.static_forward_context
        unaware = [
            f"{name} ({type(layer.impl).__name__})"
            for name, layer in layers.items()
            if hasattr(layer, "impl") and not getattr(layer.impl, "attends_to_trees", False)
        ]
        if unaware:
            # A backend that ignores the trees would give wrong output without any error.
            raise ValueError(
                "these attention layers use a backend that knows nothing of draft trees: "
                f"{', '.join(unaware)}; leave attention_backend at its default or run without "
                "vllm-trie's speculative methods"
            )

    # -- state of requests ---------------------------------------------------------------------

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

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.start()
        return super().execute_model(*args, **kwargs)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        start = time.perf_counter()
        batch = self.input_batch
        self._tree_batch = None
        self._step_trees = trees_of_step(
            self._stored_trees,
            scheduler_output.scheduled_spec_decode_tokens,
            batch.req_id_to_index,
            batch.num_reqs,
        )
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self._place_trees(num_scheduled_tokens, num_tokens)
        decoding = batch.num_reqs + sum(len(tree.token_ids) for tree in self._step_trees)
        self._decode_tokens = num_tokens if num_tokens == decoding else 0
        self._tree_stats.preparation_seconds += time.perf_counter() - start
        return prepared

    def _place_trees(self, num_scheduled_tokens: np.ndarray, num_tokens: int) -> None:
        """Set the nodes' positions and describe the trees to the attention backend."""
        ends = self.query_start_loc.np[1:]
        computed = self.input_batch.num_computed_tokens_cpu
        rows, words, positions = [], [], []
        takes_chains = prefers_chains(self.device, self.dtype, self.kv_cache_dtype)
        for index, tree in enumerate(self._step_trees):
            num_nodes = len(tree.token_ids)
            if not num_nodes:
                continue
            end = int(ends[index])
            if tree.token_ids[-1] < 0:
                # Placeholders of the scheduler: no token, but the embedding must find one.
                self.input_ids.gpu[end - num_nodes : end].clamp_(min=0)
            if not takes_chains and tree.tree.is_chain:
                continue  # to vLLM's kernel
            num_queries = int(num_scheduled_tokens[index])
            seq_len = int(computed[index]) + num_queries
            rows.append(TreeRow(index, end - num_queries, num_queries, num_nodes, seq_len))
            words.append(tree.tree.ancestor_words())
            positions.append((end - num_nodes, seq_len - num_nodes - 1 + tree.depths))
        if not rows:
            return
        self._tree_batch = build_tree_batch(rows, words, num_tokens)
        token_rows = np.concatenate([first + np.arange(len(p)) for first, p in positions])
        values = np.concatenate([p for _, p in positions])
        if self.positions.device.type == "cpu":
            self.positions.numpy()[token_rows] = values
        else:
            self.positions[torch.from_numpy(token_rows).to(self.device)] = torch.from_numpy(
                values
            ).to(self.device)

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        # The walk needs to know of which rows there are logits. vLLM's own method also computes
        # what its rejection sampler reads, which costs more than all of the plugin's work in a
        # step without drafts.
        num_sampled = num_draft_tokens + 1
        rows = cu_num_scheduled_tokens - 1
        if num_draft_tokens.any():
            ends = np.cumsum(num_sampled)
            rows = np.repeat(cu_num_scheduled_tokens - ends, num_sampled) + np.arange(ends[-1])
        logits_indices = torch.from_numpy(rows.astype(np.int32)).to(self.device)
        unused = logits_indices[:0]
        return SpecDecodeMetadata(
            draft_token_ids=unused,
            num_draft_tokens=num_draft_tokens.tolist(),
            cu_num_draft_tokens=unused,
            cu_num_sampled_tokens=unused,
            target_logits_indices=unused,
            bonus_logits_indices=unused,
            logits_indices=logits_indices,
        )

    # -- 2. attention --------------------------------------------------------------------------

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if self._tree_batch is not None:
            for layer_metadata in {id(m): m for m in metadata.values()}.values():
                setattr(layer_metadata, TREE_ATTRIBUTE, self._tree_batch)
        return metadata, common

    # -- 3. verification -----------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        start = time.perf_counter()
        num_requests = len(self._step_trees)
        sampling_metadata = self.input_batch.sampling_metadata
        base = [0] * num_requests
        for index in range(1, num_requests):
            base[index] = base[index - 1] + len(self._step_trees[index - 1].token_ids) + 1
        if spec_decode_metadata is None or spec_decode_metadata.max_spec_len == 0:
            self._last_rows = base
            self._remember_steps([[]] * num_requests, base, logits)
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)

        if is_plain_greedy(sampling_metadata):
            argmax = argmax_of_rows(self.sampler, logits)
            sample = sample_greedy(argmax, base, self._step_trees)
        else:
            argmax = None
            sample = sample_levels(self.sampler, logits, base, self._step_trees, sampling_metadata)
        self._last_rows = [
            row + (path[-1] + 1 if path else 0)
            for row, path in zip(base, sample.accepted, strict=True)
        ]
        self._remember_steps(sample.accepted, base, logits, argmax)
        self._compact(sample.accepted)
        if self._budget is not None:
            self._budget.observe_verified(
                self.input_batch.req_ids,
                [tree.tree for tree in self._step_trees],
                sample.accepted,
            )
        output = _padded(sample, logits.device)
        self._tree_stats.verification_seconds += time.perf_counter() - start
        return output

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

    def _remember_steps(
        self,
        accepted: Sequence[Sequence[int]],
        base: Sequence[int],
        logits: torch.Tensor | None,
        argmax: list[int] | None = None,
    ) -> None:
        """Keep what the drafters are told about the verification of each request."""
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
        if self._budget is not None and self._decode_tokens:
            self._budget.observe_step(self._decode_tokens, self._clock.stop())
        stats, guarded = self._tree_stats, self._guarded
        before = guarded.seconds
        max_nodes = scheduler_output.num_spec_tokens_to_schedule
        is_drafting = self._is_drafting()
        requests, request_rows = [], []
        for row, (request_id, new_tokens) in enumerate(
            zip(self.input_batch.req_ids, sampled_token_ids, strict=True)
        ):
            if not new_tokens:  # a prefill that goes on
                continue
            stats.steps += 1
            stats.tokens += len(new_tokens)
            if not is_drafting:
                continue
            request = self._draft_request(row, request_id, new_tokens[-1], max_nodes)
            if request is not None:
                if guarded.drafter.needs_hidden_states:
                    request.hidden_state = sample_hidden_states[self._last_rows[row]]
                requests.append(request)
                request_rows.append(row)
        trees: list[TokenTree] = []
        if is_drafting:
            trees = self._draft(requests, num_rows=sum(map(bool, sampled_token_ids)))
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for request_id in self.input_batch.req_ids:
            self._stored_trees.pop(request_id, None)
        for request, row, tree in zip(requests, request_rows, trees, strict=True):
            if tree.num_nodes:
                pending = PendingTree.of(tree)
                self._stored_trees[request.request_id] = pending
                drafts[row] = pending.token_ids
        drafting = guarded.seconds - before
        stats.drafting_seconds += drafting
        elapsed = time.perf_counter() - start
        stats.bookkeeping_seconds += elapsed - drafting
        if self._budget is not None and drafting:
            self._budget.observe_drafting(elapsed)
        return drafts

    def _is_drafting(self) -> bool:
        """Whether the next step may have drafts."""
        # Ranks measure different times: only rank 0's choice counts, and all draft at every step.
        alone = self.parallel_config.tensor_parallel_size == 1
        return self._budget is None or not alone or self._budget.should_draft()

    def _draft(self, requests: list[DraftRequest], num_rows: int) -> list[TokenTree]:
        """The trees of the next step, the same on all ranks."""
        trees = self._guarded.propose(requests) if requests else []
        if self._budget is not None:
            trees = self._budget.cut([request.request_id for request in requests], trees, num_rows)
        if self.parallel_config.tensor_parallel_size == 1:
            return trees
        return tree_exchange.same_on_all_ranks(trees)

    def _draft_request(
        self, row: int, request_id: str, last_token: int, budget: int
    ) -> DraftRequest | None:
        """The request as the drafter sees it; ``None`` if it shall get no draft."""
        batch = self.input_batch
        num_tokens = int(batch.num_tokens_no_spec[row])
        state = self.requests[request_id]
        limits = drafting_limits(state, last_token, num_tokens, self.max_model_len)
        max_nodes = min(budget, limits.max_nodes)
        if max_nodes <= 0 or limits.max_depth <= 0:
            return None
        return DraftRequest(
            request_id=request_id,
            token_ids=_read_only(batch.token_ids_cpu[row, :num_tokens]),
            num_prompt_tokens=int(batch.num_prompt_tokens[row]),
            max_nodes=max_nodes,
            max_depth=limits.max_depth,
            chain_only=limits.chain_only,
            last_step=self._last_steps.get(request_id),
            cache_salt=limits.cache_salt,
        )

    # -- statistics ----------------------------------------------------------------------------

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self._tree_stats.steps:
            failures = self._guarded.failures
            if failures != self._reported_failures:
                self._tree_stats.draft_failures = {
                    reason: count - self._reported_failures.get(reason, 0)
                    for reason, count in failures.items()
                    if count != self._reported_failures.get(reason, 0)
                }
                self._reported_failures = dict(failures)
            setattr(output, STATS_ATTRIBUTE, self._tree_stats)
            self.tree_totals.add(self._tree_stats)
            self._tree_stats = TreeStats()
        self._clock.leave()
        return output


def _read_only(view: np.ndarray) -> np.ndarray:
    """The view, so that a drafter that writes to it fails instead of changing the request."""
    view.flags.writeable = False
    return view


def calibrate_step_cost(runner: Any, seconds: float = 2.0) -> None:
    """Give the adaptive budget a first idea of what tokens cost, by forward passes on no request.

    Attention is left out; what the steps really take is learned as they come.

    Args:
        runner: a runner with the mixin, ready to run.
        seconds: about the longest time to spend.
    """
    if runner.drafter.node_budget is None:
        return
    start = time.perf_counter()
    sizes = [n for n in (1, 2, 5, 9, 17, 33, 65) if n <= runner.max_num_tokens]
    for repeat in range(3):
        for num_tokens in sizes:
            begin = time.perf_counter()
            hidden_states, _ = runner._dummy_run(num_tokens)
            runner.model.compute_logits(hidden_states[:num_tokens])
            if repeat:  # the first one warms up
                runner.drafter.node_budget.observe_step(num_tokens, time.perf_counter() - begin)
        if repeat and time.perf_counter() - start > seconds:
            return


def _padded(sample: TreeSample, device: torch.device) -> SamplerOutput:
    """vLLM's form of the sample: rows padded with -1, at least two columns.

    vLLM reads a single column as the output of a step without speculation.
    """
    width = max(2, max(map(len, sample.token_ids)))
    rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in sample.token_ids]
    token_ids = torch.from_numpy(np.array(rows, dtype=np.int32)).to(device)
    return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=sample.logprobs)


def add_trees(runner: Any) -> None:
    """Put the mixin in front of the runner's class; does nothing if it is there already."""
    cls = type(runner)
    if issubclass(cls, TreeRunnerMixin):
        return
    runner.__class__ = type(f"Tree{cls.__name__}", (TreeRunnerMixin, cls), {})
    runner.init_trees()
