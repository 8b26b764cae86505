"""vLLM's rejection sampler where a request's draft may be filled up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from vllm_trie.vllm_hooks.worker.runners.v2_adapter import V2Adapter


class DraftedOnly(RejectionSampler):
    """Accepts tokens that were drafted, and no fillers.

    A rejected filler leaves the target's distribution as it is, so that a request without a draft
    gets the token that it would get without speculation, sampled ones with a seed included.

    Args:
        stock: in whose place this goes.
        spec_config: of the engine.
        adapter: knows how many tokens were drafted. Before it drafts, this is vLLM's sampler.
    """

    def __init__(
        self, stock: RejectionSampler, spec_config: SpeculativeConfig, adapter: V2Adapter
    ) -> None:
        device = adapter.num_drafted.device
        super().__init__(stock.sampler, spec_config, device, watermark_key=stock.watermark_key)
        self._adapter = adapter

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        if not self._adapter.is_drafting:
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        # Row i of a request verifies its draft token i - 1; row 0 belongs to its last token.
        num_drafted = self._adapter.num_drafted[input_batch.expanded_idx_mapping]
        fillers = input_batch.expanded_local_pos > num_drafted
        if invalid_drafts is not None:
            fillers |= invalid_drafts
        return super().__call__(logits, input_batch, draft_logits, fillers)
