"""Tree speculation in a patched vLLM, whose model runner asks its proposer at the right places."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.spec_decode.draft_verifier import DraftVerifier  # type: ignore[import-not-found]

from vllm_trie.attention import TreeBatch
from vllm_trie.vllm_hooks.worker.cpu_worker import choose_attention
from vllm_trie.vllm_hooks.worker.drafting.proposer import TreeProposer
from vllm_trie.vllm_hooks.worker.runners.v1_adapter import V1Adapter, V1TreeAdapter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class TreeDraftVerifier(TreeProposer, DraftVerifier):
    """The proposer of the plugin's methods, which has its drafts verified by the adapter."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        # The only platform that :mod:`vllm_trie.vllm_hooks.setup.support` lets through. The runner
        # makes its proposer before it loads the model, so this is in time.
        choose_attention(for_trees=not self.chain_only)

    def bind(self, runner: GPUModelRunner) -> None:
        adapter = V1Adapter if self.chain_only else V1TreeAdapter
        self.adapter = adapter(runner, self.trees)

    def load_model(self, target_model: Any, *unused: Any, **unused_too: Any) -> None:
        super().load_model(target_model)
        self.adapter.check_layers()

    def warm_up(self) -> None:
        self.adapter.calibrate()

    def keeps_to_max_model_len(self) -> bool:
        return True

    def remove_request(self, req_id: str) -> None:
        self.trees.release(req_id)

    def start_step(self) -> None:
        self.adapter.start_step()

    def spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        return self.adapter.logits_metadata(num_draft_tokens, cu_num_scheduled_tokens)

    def place_drafts(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> None:
        self.adapter.begin_step(scheduler_output)

    def draft_trees(self) -> TreeBatch | None:
        return self.trees.tree_batch

    def verify(self, logits: Any, spec_decode_metadata: Any) -> SamplerOutput:
        return self.adapter.sample(logits, spec_decode_metadata)

    def propose_for_step(self, step: Any) -> list[list[int]]:
        self.adapter.end_step(step.sampled_token_ids)
        return self.adapter.draft(
            step.scheduler_output, step.sampled_token_ids, step.sample_hidden_states
        )

    def take_stats(self) -> dict[str, Any] | None:
        stats = self.trees.take_stats()
        return None if stats is None else asdict(stats)
