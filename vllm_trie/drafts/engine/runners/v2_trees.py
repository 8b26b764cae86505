"""Steps of Model Runner V2 with trees: their places, and a sampler that walks down them.

Every request with a draft verifies N nodes. A smaller tree is filled up with nodes that no other
node sees and that no walk goes to. The host knows each request's text when a step is prepared, as
it has drafted from it, so that it places the trees; verification and compaction stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.math_utils import round_up
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from vllm_trie.drafts.engine.attention.tree_attention import hand_on, take_back
from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter
from vllm_trie.drafts.engine.runners.v2_experts import follow_paths
from vllm_trie.drafts.engine.tree_step import TreeStep
from vllm_trie.drafts.engine.verification.kernels import NO_PARENT, walk_trees
from vllm_trie.drafts.engine.verification.placement import QueryTokens, follow_depths
from vllm_trie.hooks.ledger.record import Symbols

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch

_ALIGNED = 4
"""int32 in 16 bytes."""
_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)
"""vLLM's logits processors. The first one reads positions only, the others also drafts."""


class TreeSampler(RejectionSampler):
    """Verifies a step's trees in place of vLLM's rejection sampler.

    Args:
        stock: In whose place this goes.
        spec_config: Of the engine.
        adapter: Knows the step's trees, and moves the accepted nodes' KV afterwards.
    """

    def __init__(
        self, stock: RejectionSampler, spec_config: SpeculativeConfig, adapter: V2TreeAdapter
    ) -> None:
        super().__init__(stock.sampler, spec_config, adapter.num_drafted.device)
        self._adapter = adapter
        self._width = self.num_speculative_steps + 1

    @Symbols("v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.").within_wrappers
    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        if not self._adapter.is_drafting:  # vLLM's warm-up
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        draft_tokens, parents = self._adapter.resume("logits", logits)
        sampled, scores = self._sample(logits, input_batch, draft_tokens)
        if invalid_drafts is not None:
            parents = parents.masked_fill(invalid_drafts, NO_PARENT)
        walked = walk_trees(sampled, draft_tokens, parents, input_batch.cu_num_logits, self._width)
        self._adapter.resume("path", (input_batch.logits_indices, walked.rows))
        connector = self._adapter.runner.aux_output_connector
        if connector is not None:
            follow_paths(connector, input_batch.logits_indices, walked.rows)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            walked.num_tokens,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=walked.tokens,
            logprobs_tensors=self._logprobs(scores, input_batch, sampled, walked.rows),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample(
        self, logits: torch.Tensor, batch: InputBatch, draft_tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target's token after each row, and the logits that logprobs come from.

        vLLM's sampler may copy the logits in float32; parts of the batch bound the copy's size.
        """
        positions = batch.positions[batch.logits_indices]
        needs_logprobs = self.sampler.get_logprobs_dims(batch.idx_mapping_np) is not None
        sampled, processed = [], []
        for requests, rows in self._parts(batch.cu_num_logits_np, logits.shape[1]):
            tokens, scores = self.sampler.sample(
                logits[rows],
                batch.expanded_idx_mapping[rows],
                batch.idx_mapping[requests],
                batch.idx_mapping_np[requests],
                positions[rows],
                draft_tokens[rows],
                batch.expanded_local_pos[rows],
                batch.seq_lens_cpu_upper_bound.numpy()[requests],
                needs_logprobs,
            )
            sampled.append(tokens)
            if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
                processed.append(scores)
        return torch.cat(sampled), torch.cat(processed) if processed else logits

    def _parts(self, first_rows: np.ndarray, vocab_size: int) -> Iterator[tuple[slice, slice]]:
        """Yield neighbouring requests and their rows; a request is never split."""
        most, num_requests, start = get_max_chunk_logits(vocab_size), len(first_rows) - 1, 0
        while start < num_requests:
            end = int(np.searchsorted(first_rows, first_rows[start] + most, side="right")) - 1
            end = min(max(end, start + 1), num_requests)
            yield slice(start, end), slice(int(first_rows[start]), int(first_rows[end]))
            start = end

    def _logprobs(
        self, scores: torch.Tensor, batch: InputBatch, sampled: torch.Tensor, rows: torch.Tensor
    ) -> LogprobsTensors | None:
        """Return the logprobs of the output tokens: a request's rows in the order of its path."""
        dimensions = self.sampler.get_logprobs_dims(batch.idx_mapping_np)
        if dimensions is None:
            return None
        num_logprobs, num_token_ids = dimensions
        return compute_topk_scores(
            scores[rows],
            num_logprobs,
            sampled[rows],
            batch.cu_num_logits_np.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.expanded_idx_mapping,
            max_per_req_token_ids=num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


class V2TreeAdapter(V2Adapter):
    """Verifies trees in place of vLLM."""

    chain_only = False
    sampler_class = TreeSampler
    _processors_read_chains = False

    @property
    def _takes_chains(self) -> bool:
        """Whether tree attention takes chains, too: only on CPUs it is faster than vLLM's."""
        return self._device.type == "cpu"

    def load_model(self, target_model: torch.nn.Module, *unused: Any, **unused_too: Any) -> None:
        super().load_model(target_model)
        runner = self.runner
        assert runner.sampler is not None
        processors = runner.sampler.logits_processors
        self._processors_read_chains = not all(isinstance(p, _PROCESSORS) for p in processors)
        state: Any = runner.model_state
        state.prepare_attn = partial(self._prepare_attn, state.prepare_attn)
        if runner.model_config.uses_mrope:
            state.prepare_inputs = partial(self._prepare_inputs, state.prepare_inputs)

    def _prepare_attn(
        self,
        original: Callable[..., Any],
        batch: InputBatch,
        mode: Any,
        tables: Any,
        slot_mappings: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return a model state's metadata with the step's trees. Before it positions of nodes
        follow their depth, once the KV slots follow from flat ones."""
        if self.waits_for == "positions":  # not in a dummy run
            self.resume("positions", slot_mappings)
        by_layer = original(batch, mode, tables, slot_mappings, *args, **kwargs)
        hand_on(self.verifier.step.tree_batch, by_layer)
        return by_layer

    def _prepare_inputs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a model state's inputs, whose positions in all dimensions (M-RoPE) follow the
        depths of the step's nodes."""
        inputs = original(*args, **kwargs)
        places = self.verifier.step.places
        if places is not None and self.waits_for == "masks":  # not in a dummy run
            follow_depths(inputs["positions"], places)
        return inputs

    def place(self, step: TreeStep, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Put the step's trees in place.

        Returns:
            Token and parent of each row of logits, see :func:`walk_trees`; None without drafts.
        """
        if batch.num_draft_tokens == 0:
            return None
        num_draft_tokens = batch.num_draft_tokens_per_req
        assert num_draft_tokens is not None
        num_computed = np.zeros(batch.num_reqs, dtype=np.int64)
        num_rows = int(batch.cu_num_logits_np[-1])
        # Triton compiles a kernel anew for pointers that are not aligned.
        rows = np.zeros((2, round_up(num_rows, _ALIGNED)), dtype=np.int32)
        draft_tokens, parents = rows
        parents.fill(NO_PARENT)
        trees = list(step.trees)
        for index, tree in enumerate(trees):
            if not tree.num_nodes:
                continue
            num_committed = batch.num_scheduled_tokens[index] - num_draft_tokens[index]
            text_length = self._requests[batch.req_ids[index]].num_tokens
            num_computed[index] = text_length - num_committed
            first = batch.cu_num_logits_np[index] + 1
            nodes = slice(first, first + tree.num_nodes)
            draft_tokens[nodes] = tree.token_ids
            parents[nodes] = tree.parents + 1
            if tree.never_accept is not None:
                parents[nodes][tree.never_accept] = NO_PARENT
            trees[index] = tree.filled_up(num_draft_tokens[index])
        on_device = async_tensor_h2d(rows, device=self._device)
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        tokens = QueryTokens(starts, num_computed, batch.positions)
        self.verifier.place(step, tokens, self._takes_chains, trees)
        return on_device[0, :num_rows], on_device[1, :num_rows]

    def flatten(
        self, batch: InputBatch, by_layer: Mapping[str, object], states: Sequence[torch.Tensor]
    ) -> None:
        step = self.verifier.step
        if step.path is None or step.places is None:
            return
        take_back(by_layer)
        nodes, shifts = step.places
        follow_depths(batch.positions, torch.stack([nodes, -shifts]))
        tokens, rows = step.path
        for values in (batch.input_ids, *states):
            values[tokens] = values[tokens[rows]]

    def _needs_chain(self, params: SamplingParams) -> bool:
        return (
            self._processors_read_chains
            or bool(params.bad_words)
            or params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
