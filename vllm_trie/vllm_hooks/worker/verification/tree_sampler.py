"""Lossless verification of trees on Model Runner V2, without the host.

Model Runner V2 draws a token with noise that depends on the request's seed, the position and the
token alone. Each row of logits is therefore sampled once, as plain decoding would sample it at its
position, and :func:`walk_trees` takes the rows on the path that the samples follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from vllm_trie.vllm_hooks.worker.verification.tree_walk import NO_PARENT, walk_trees

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_trie.vllm_hooks.worker.runners.v2_trees import V2TreeAdapter


class TreeSampler(RejectionSampler):
    """Verifies a step's trees in place of vLLM's rejection sampler.

    Args:
        stock: in whose place this goes.
        spec_config: of the engine.
        adapter: knows the step's trees, and moves the accepted nodes' KV afterwards.
    """

    def __init__(
        self, stock: RejectionSampler, spec_config: SpeculativeConfig, adapter: V2TreeAdapter
    ) -> None:
        super().__init__(stock.sampler, spec_config, adapter.num_drafted.device)
        self._adapter = adapter
        self._width = self.num_speculative_steps + 1

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
        draft_tokens, parents = self._adapter.draft_rows
        self._adapter.keep_argmax(logits)
        sampled, scores = self._sample(logits, input_batch, draft_tokens)
        if invalid_drafts is not None:
            parents = parents.masked_fill(invalid_drafts, NO_PARENT)
        walked = walk_trees(sampled, draft_tokens, parents, input_batch.cu_num_logits, self._width)
        self._adapter.keep_path(input_batch.logits_indices, walked.rows)
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
        sampled, processed = [], []
        for requests, rows in self._parts(batch.cu_num_logits_np, logits.shape[1]):
            own, own_processed = self.sampler.sample(
                logits[rows],
                batch.expanded_idx_mapping[rows],
                batch.idx_mapping[requests],
                batch.idx_mapping_np[requests],
                positions[rows],
                draft_tokens[rows],
                batch.expanded_local_pos[rows],
                batch.seq_lens_cpu_upper_bound.numpy()[requests],
            )
            sampled.append(own)
            if self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES:
                processed.append(own_processed)
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
        num_logprobs = self.sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)
        if num_logprobs == NO_LOGPROBS:
            return None
        return compute_topk_scores(
            scores[rows],
            num_logprobs,
            sampled[rows],
            batch.cu_num_logits_np.tolist(),
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
