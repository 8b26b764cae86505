"""Model Runner V1's steps in the terms of :class:`TreeVerifier`, called by the overrides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_trie.attention import prefers_chains
from vllm_trie.device_copy import to_device
from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.setup.draft_support import check_layers
from vllm_trie.vllm_hooks.wire import STATS_ATTRIBUTE
from vllm_trie.vllm_hooks.worker.beam.beams_v1 import num_requests
from vllm_trie.vllm_hooks.worker.calibration import calibrate_step_cost
from vllm_trie.vllm_hooks.worker.drafting.draft_requests import draft_requests
from vllm_trie.vllm_hooks.worker.verification.compaction import CacheGroup, cache_groups
from vllm_trie.vllm_hooks.worker.verification.placement import QueryTokens, logits_tokens
from vllm_trie.vllm_hooks.worker.verifier_setup import make_verifier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_trie.attention import TreeBatch


class V1Speculation:
    """The proposer of the plugin's methods, and what else a step does for speculation.

    Attributes:
        trees: The verifier of this rank.
        chain_only: Whether vLLM verifies the drafts, as chains.
    """

    runner: GPUModelRunner

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.trees = make_verifier(vllm_config)
        self.chain_only = config.verification(vllm_config) == "chain"
        self._has_ended = False  # whether this step's tokens were taken in

    def propose(self, *unused: object, **unused_too: object) -> None:
        """Refuse a model runner that expects chains of drafts from a proposer.

        Raises:
            RuntimeError: always. Only a runner without the plugin's overrides calls this.
        """
        raise RuntimeError(
            "vllm-trie's drafters need the plugin's worker class, and this engine runs another "
            "one; leave worker_cls at 'auto'"
        )

    def bind(self, runner: GPUModelRunner) -> None:
        """Learn of the runner, which is being made."""
        self.runner = runner

    def load_model(
        self, target_model: torch.nn.Module, *unused: object, **unused_too: object
    ) -> None:
        """Load the drafter's own weights, if it has any; refuse a model that verifies no trees."""
        self.trees.guard.drafter.load_model(target_model)
        if not self.chain_only:
            layers = self.runner.compilation_config.static_forward_context
            check_layers(self.runner.vllm_config, layers)

    def warm_up(self) -> None:
        """Let the node budget observe forward passes; the runner is ready and has no requests."""
        runner = self.runner
        model: Any = runner.model

        def run_step(num_tokens: int) -> None:
            hidden_states, _ = runner._dummy_run(num_tokens)
            model.compute_logits(hidden_states[:num_tokens])
            runner._sync_device()  # a GPU may still be at work

        num_ranks = runner.parallel_config.world_size_across_dp
        calibrate_step_cost(self.trees.budget, run_step, runner.max_num_tokens, num_ranks)

    def keeps_to_max_model_len(self) -> bool:
        """Return whether limits are kept for each request.

        vLLM's answer is for the whole batch: one request near the length limit would cost all
        others their drafts.
        """
        return True

    def remove_request(self, req_id: str) -> None:
        """Forget a request that has ended."""
        self.trees.release(req_id)

    def start_step(self) -> None:
        self._has_ended = False
        self.trees.start_step(self.runner.input_batch.num_reqs)

    def place_drafts(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray | None = None
    ) -> None:
        """Find the step's drafts, whose inputs are prepared as if all were chains; place trees."""
        runner, batch = self.runner, self.runner.input_batch
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_tokens = scheduler_output.total_num_scheduled_tokens
        request_ids = batch.req_ids[: num_requests(runner)]
        self.trees.begin_step(request_ids, drafts, num_tokens)
        if self.trees.recorder is not None:
            self.trees.recorder.begin(scheduler_output.scheduled_new_reqs)
        if drafts and not self.chain_only:
            tokens = QueryTokens(
                runner.query_start_loc.np[: batch.num_reqs + 1],
                batch.num_computed_tokens_cpu,
                runner.positions,
                runner.input_ids.gpu,
            )
            dtype: Any = runner.dtype
            self.trees.place(tokens, prefers_chains(runner.device, dtype, runner.kv_cache_dtype))

    def draft_trees(self) -> TreeBatch | None:
        return self.trees.tree_batch

    def spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        """Return which rows of logits the step needs, without what vLLM's rejection sampler reads
        where the plugin verifies."""
        if self.chain_only:
            return self.runner._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)
        tokens = logits_tokens(num_draft_tokens, cu_num_scheduled_tokens)
        logits_indices = to_device(tokens, self.runner.device)
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

    def verify(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        """Sample the step's tokens; walk down its trees and move the accepted nodes' KV."""
        runner, batch = self.runner, self.runner.input_batch
        output: SamplerOutput
        if not self.chain_only:
            outputs = cast(list[list[int]], batch.req_output_token_ids)
            output = self.trees.verify(logits, runner.sampler, batch.sampling_metadata, outputs)
            if self.trees.tree_batch is not None:
                tables = batch.block_table
                slot_mappings = [tables[g.group_id].slot_mapping.gpu for g in self._cache_groups]
                self.trees.compact(self._cache_groups, slot_mappings)
        elif spec_decode_metadata is None:
            output = runner.sampler(logits=logits, sampling_metadata=batch.sampling_metadata)
        else:
            output = runner.rejection_sampler(
                spec_decode_metadata, None, logits, batch.sampling_metadata
            )
        return output

    def end_step(self, new_tokens: Sequence[Sequence[int]]) -> None:
        """Take in the step's tokens.

        Args:
            new_tokens: Of each request; none while its prefill goes on.
        """
        if self.chain_only:
            self.trees.observe_outputs(new_tokens)
        self.trees.end_step(new_tokens)
        self._has_ended = True

    def draft(
        self,
        scheduler_output: SchedulerOutput,
        new_tokens: list[list[int]],
        sample_hidden_states: torch.Tensor,
    ) -> list[list[int]]:
        """Return the draft tokens of each request of the batch for the next step.

        Args:
            scheduler_output: Of the step that has ended.
            new_tokens: Of each request; none while its prefill goes on.
            sample_hidden_states: [logits rows, hidden_size].
        """
        start = time.perf_counter()
        runner = self.runner
        drafts: list[list[int]] = [[] for _ in new_tokens]
        if not self.trees.is_pausing:
            requests = draft_requests(
                runner.input_batch,
                runner.requests,
                new_tokens,
                runner.max_model_len,
                scheduler_output.num_spec_tokens_to_schedule,
                self.chain_only,
            )
            drafts = self.trees.draft(requests, len(new_tokens), sample_hidden_states, start)
        return drafts

    def finish(self, output: ModelRunnerOutput | AsyncModelRunnerOutput) -> None:
        """Attach the step's statistics to vLLM's output of the step."""
        new_tokens = getattr(output, "sampled_token_ids", None)
        if self.trees.is_pausing and new_tokens and not self._has_ended:  # vLLM did not ask
            self.end_step(new_tokens)
        stats = self.trees.take_stats()
        if stats is not None:
            setattr(output, STATS_ATTRIBUTE, stats)

    @cached_property
    def _cache_groups(self) -> list[CacheGroup]:
        layers = self.runner.compilation_config.static_forward_context
        return cache_groups(self.runner.kv_cache_config, layers)
