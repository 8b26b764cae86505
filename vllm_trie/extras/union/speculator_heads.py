"""A trained drafter on Model Runner V2: vLLM's own speculator, whose predictions the host reads.

The speculator runs in every step, as it does for vLLM's own method. After trees the accepted nodes
come first, as after a chain, so that its KV cache follows the accepted tokens. Its passes are only
queued, and the host waits for the predictions where the union drafts::

    device   [ step k ][ sampled tokens ][ passes of the speculator ][ predictions ]
    host                                                            waits           [ union ]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from vllm_trie.drafts import DraftRequest
from vllm_trie.drafts.engine.verification.kernels import likeliest_on_device
from vllm_trie.drafts.ngrams import Candidates
from vllm_trie.drafts.ngrams.native import ROW_TOKENS

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_trie.drafts.engine.runners.v2_adapter import V2Adapter


class SpeculatorHeads:
    """A source of heads: each predicts the likeliest tokens of a position, given the likeliest ones
    before it, or none of them with ``dflash``. DFlash2 and LiLiCorr score each candidate given the
    one before it; a node's children use those scores.

    The host waits for a step's predictions. Accepted nodes of a tree move behind the committed text
    before the speculator runs, as after a chain.

    Args:
        speculator: vLLM's, as made. Its ``propose`` is replaced by one that returns the union's
            drafts, and its estimate of acceptance by one that keeps the likeliest tokens, or its
            walk through candidates by one that keeps them.
        adapter: Drafts with the union, which calls :meth:`candidates`.
    """

    def __init__(self, speculator: Any, adapter: V2Adapter) -> None:
        self._speculator = speculator
        self._adapter = adapter
        self._run_speculator: Callable[..., torch.Tensor] = speculator.propose
        # By the runner's request index; CUDA graphs are padded with requests of index -1.
        num_rows, self._count = speculator.draft_tokens.shape
        sampler: Any = getattr(speculator, "candidate_sampler", None)
        num_candidates = ROW_TOKENS if sampler is None else sampler.top_k
        shape = num_rows + 1, self._count, num_candidates
        self._kept = [  # the fields of `Candidates`
            torch.zeros(shape, dtype=torch.int32, device=speculator.device),
            torch.zeros(shape, device=speculator.device),
        ]
        if sampler is not None:
            pairs = num_rows + 1, self._count - 1, num_candidates, num_candidates
            self._kept.append(torch.zeros(pairs, device=speculator.device))
            self._walk: Callable[..., None] = sampler.sample
            sampler.sample = self._keep_candidates
        # On their way to the host: the rows of the requests, their predictions, and the event.
        self._rows: Mapping[str, int] = {}
        self._copies: list[np.ndarray] = []
        self._copied = torch.cuda.Event()  # as the device waits for the host
        self._make_graphs: Callable[..., None] = speculator.init_cudagraph_manager
        speculator.propose = self._propose
        speculator.init_cudagraph_manager = self._init_cudagraph_manager
        speculator._maybe_predict_acceptance = self._keep_likeliest

    def candidates(self, requests: Sequence[DraftRequest]) -> Candidates:
        """Wait for the step's predictions and return those of some requests."""
        self._copied.synchronize()
        rows = [self._rows[request.request_id] for request in requests]
        return Candidates(*(np.nan_to_num(copy[rows]) for copy in self._copies))

    def _init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """Tell the speculator of N while it makes managers of CUDA graphs, as batches verify N
        tokens a request."""
        self._speculator.num_speculative_steps = self._adapter.num_draft_tokens
        self._make_graphs(cudagraph_mode)
        self._speculator.num_speculative_steps = self._count

    def _propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Mapping[str, object],
        slot_mappings: object,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Sequence[torch.Tensor] | None,
        *rest: object,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **more: object,
    ) -> torch.Tensor:
        """End the step, then run the speculator; see ``BaseSpeculator.propose``.

        KV of accepted nodes moves first, as the speculator computes the slots of its own tokens
        where those of the step are.
        """
        drafts = None
        if not dummy_run:
            states = last_hidden_states, *(aux_hidden_states or ())
            self._adapter.flatten(input_batch, attn_metadata, states)
            max_nodes = self._adapter.num_draft_tokens
            if num_speculative_tokens is not None:
                max_nodes = num_speculative_tokens
            drafts = self._adapter.propose(input_batch, last_hidden_states, max_nodes)
        chains = self._run_speculator(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *rest,
            dummy_run=dummy_run,
            num_speculative_tokens=self._count if num_speculative_tokens != 0 else 0,
            **more,
        )
        if drafts is None:
            return chains
        self._rows = {request_id: row for row, request_id in enumerate(input_batch.req_ids)}
        self._copies = [async_copy_to_np(kept[input_batch.idx_mapping]) for kept in self._kept]
        self._copied.record()
        return drafts

    def _keep_likeliest(
        self, logits: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> None:
        """Keep the likeliest tokens of a position, or of one for each row; part of CUDA graphs."""
        tokens, probabilities = likeliest_on_device(logits)
        if self._speculator.method == "dspark":  # whose logits are of its own vocabulary
            tokens = self._speculator.model.map_draft_to_target(tokens).int()
        # One index of rows: PyTorch would read an index without dimensions on the host.
        rows = idx_mapping * self._count + draft_step
        self._kept[0].flatten(0, 1)[rows] = tokens
        self._kept[1].flatten(0, 1)[rows] = probabilities

    def _keep_candidates(
        self,
        candidate_ids: torch.Tensor,
        scores: torch.Tensor,
        num_reqs: int,
        sample_pos: torch.Tensor,
        idx_mapping: torch.Tensor,
        *rest: object,
    ) -> None:
        """Walk to vLLM's chain, then keep the candidates of all positions; part of CUDA graphs.

        Args:
            candidate_ids: int64 [num_reqs, K, m].
            scores: [num_reqs, K, m, m]: of each position's candidates, the last dimension, after
                each candidate of the position before.
            num_reqs, sample_pos, rest: See ``CandidateSampler.sample``.
            idx_mapping: Of the requests, at least [num_reqs * K].
        """
        self._walk(candidate_ids, scores, num_reqs, sample_pos, idx_mapping, *rest)
        rows = idx_mapping[: num_reqs * self._count : self._count]
        along_chain = self._speculator.candidate_sampler.scores[:num_reqs]
        tokens, probabilities, transitions = self._kept
        tokens[rows] = candidate_ids.int()
        probabilities[rows] = along_chain.softmax(-1)
        transitions[rows] = scores[:, 1:].float().softmax(-1)
