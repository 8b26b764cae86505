"""Chains of a trained drafter on Model Runner V2: those of vLLM's own speculator, read by the host.

The speculator runs in every step, as it does for vLLM's own method: chains are verified at their
flat positions, so that its KV cache follows the accepted tokens without help. Its passes are only
queued, and the host waits for the chains where the union drafts::

    device   [ step ][ sampled tokens ][ passes of the speculator ][ chains ]
    host                                                    waits            [ union ]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.ngrams import Candidates

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

Propose = Callable[["InputBatch", torch.Tensor, int], torch.Tensor]
"""Takes a step's batch, its hidden states and the limit on a draft; returns the drafts that are to
be verified, int64 [requests, N]."""


class V2Chains:
    """A source of heads: each predicts one token, that of the chain.

    Args:
        speculator: vLLM's, as made. Its ``propose`` is replaced by one that returns the union's
            drafts, and its estimate of acceptance by one that keeps probabilities.
        length: Tokens of a chain, at most N.
        propose: The union, which calls :meth:`candidates`.
    """

    def __init__(self, speculator: Any, length: int, propose: Propose) -> None:
        self._speculator = speculator
        self._length = length
        self._draft_step: Callable[..., torch.Tensor] = speculator.propose
        self._propose_union = propose
        # By the runner's request index; CUDA graphs are padded with requests of index -1.
        num_rows, width = speculator.draft_tokens.shape
        self._probabilities = torch.zeros(num_rows + 1, width, device=speculator.device)
        # On their way to the host: the rows of the requests, tokens, probabilities, and the event.
        self._rows: Mapping[str, int] = {}
        self._chains: tuple[np.ndarray, np.ndarray] | None = None
        self._copied = torch.cuda.Event(blocking=True)
        self._make_graphs: Callable[..., None] = speculator.init_cudagraph_manager
        speculator.propose = self._propose
        speculator.init_cudagraph_manager = self._init_cudagraph_manager
        speculator._maybe_predict_acceptance = self._keep_probabilities

    def candidates(self, requests: Sequence[DraftRequest]) -> Candidates:
        """Wait for the step's chains and return those of some requests."""
        self._copied.synchronize()
        assert self._chains is not None
        rows = [self._rows[request.request_id] for request in requests]
        tokens, probabilities = (chains[rows][:, :, None] for chains in self._chains)
        return Candidates(tokens.astype(np.int32), probabilities)

    def _init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """Let the speculator make no more passes than a chain needs, once it has its managers of
        CUDA graphs, whose batches verify N tokens a request."""
        self._speculator.num_speculative_steps = self._probabilities.shape[1]
        self._make_graphs(cudagraph_mode)
        self._speculator.num_speculative_steps = self._length

    def _propose(
        self,
        input_batch: InputBatch,
        attn_metadata: object,
        slot_mappings: object,
        last_hidden_states: torch.Tensor,
        *rest: object,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **more: object,
    ) -> torch.Tensor:
        """Run the speculator, then the union; see ``BaseSpeculator.propose``."""
        drafted = self._draft_step(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            *rest,
            dummy_run=dummy_run,
            num_speculative_tokens=self._length if num_speculative_tokens != 0 else 0,
            **more,
        )
        if dummy_run:
            return drafted
        self._rows = {request_id: row for row, request_id in enumerate(input_batch.req_ids)}
        probabilities = self._probabilities[input_batch.idx_mapping, : self._length]
        self._chains = async_copy_to_np(drafted[:, : self._length]), async_copy_to_np(probabilities)
        self._copied.record()
        max_nodes = self._probabilities.shape[1]
        if num_speculative_tokens is not None:
            max_nodes = num_speculative_tokens
        return self._propose_union(input_batch, last_hidden_states, max_nodes)

    def _keep_probabilities(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> None:
        """Keep the probability of the likeliest token, which is drafted; part of CUDA graphs."""
        logits = logits.float()
        likeliest = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        self._probabilities[idx_mapping, draft_step] = likeliest
