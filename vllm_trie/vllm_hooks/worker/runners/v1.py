"""Model Runner V1 of a stock vLLM: overrides that call :class:`V1Speculation`.

The mixins come before the runner's class in the subclasses of
:mod:`~vllm_trie.vllm_hooks.worker.cpu_worker` and :mod:`~vllm_trie.vllm_hooks.worker.cuda_worker`:
:class:`ChainRunnerMixin` where vLLM verifies the drafts, :class:`TreeRunnerMixin` where the plugin
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_trie.vllm_hooks.ledger.record import (
    STATS,
    TREE_DRAFTS,
    TREE_MASKS,
    Symbols,
    around,
)
from vllm_trie.vllm_hooks.worker.attention.tree_attention import hand_on
from vllm_trie.vllm_hooks.worker.beam.beams_v1 import sample_and_select
from vllm_trie.vllm_hooks.worker.runners.v1_speculation import V1Speculation

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    _Runner = object

_gpu_runner = "v1.worker.gpu_model_runner:GPUModelRunner."
_runner = Symbols(_gpu_runner, TREE_DRAFTS)
_proposer = Symbols(_gpu_runner, TREE_DRAFTS)


class ChainRunnerMixin(_Runner):
    """Overrides of ``GPUModelRunner`` that draft; everything else stays vLLM's.

    vLLM asks for a step's drafts before it returns the step's tokens, and takes them after it has
    sent the tokens off. Drafts are made when they are taken, so that no answer waits for them.
    """

    adapter: V1Speculation
    """The proposer, which vLLM makes itself."""
    _deferred_draft: Callable[[], list[list[int]]] | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        drafter: Any = self.drafter
        self.adapter = drafter
        self.adapter.bind(self)

    @contextmanager
    def without_speculation(self, hidden: bool = True) -> Iterator[None]:
        """Let a method of vLLM's take the path of an engine without speculation, if `hidden`.

        ``speculative_config`` is vLLM's only switch, and it is the engine's, not the step's. With
        it, ``_prepare_inputs`` describes drafts that are not there, and ``sample_tokens`` sends the
        scheduler empty drafts of each request, or drafts of zeros if ``_input_fits_in_drafter``
        says no. On a small model this is a noticeable part of a step.
        """
        speculative_config = self.speculative_config
        if hidden:
            self.speculative_config = None
        try:
            yield
        finally:
            self.speculative_config = speculative_config

    @_proposer.overrides("forgets the trees of ended requests")
    def _on_request_state_removed(self, req_id: str, req_state: CachedRequestState | None) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.adapter.remove_request(req_id)

    @_proposer.overrides("keeps length limits per request, not for the whole batch")
    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        return self.adapter.keeps_to_max_model_len()

    @_runner.overrides("takes the duration of a step, for the adaptive node budget")
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.adapter.start_step()
        return super().execute_model(*args, **kwargs)

    @_runner.overrides(
        "positions of tree nodes follow their depth; a step without drafts is prepared as if "
        "speculative_config were None"
    )
    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        with self.without_speculation(not scheduler_output.scheduled_spec_decode_tokens):
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.adapter.place_drafts(scheduler_output)
        return prepared

    @_proposer.overrides(
        "gives drafters request ids, hidden states of the accepted node and budgets",
        until="proposers get request ids and hidden states",
    )
    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Any,
        sampling_metadata: SamplingMetadata,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        *unused: object,
        **unused_too: object,
    ) -> list[list[int]]:
        self.adapter.end_step(sampled_token_ids)
        self._deferred_draft = partial(
            self.adapter.draft, scheduler_output, sampled_token_ids, sample_hidden_states
        )
        return [[] for _ in sampled_token_ids]

    @_proposer.overrides("drafts, after vLLM has sent the step's tokens off")
    @torch.inference_mode()
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if self._deferred_draft is not None:
            self._draft_token_ids = self._deferred_draft()
            self._deferred_draft = None
        return super().take_draft_token_ids()

    @_runner.overrides(
        "attaches the worker's statistics to its output; runs as if speculative_config were None "
        "where no drafts are wanted",
        until=STATS,
    )
    def sample_tokens(self, grammar_output: Any) -> Any:  # type: ignore[override]
        is_hidden = self.adapter.trees.is_pausing and self.execute_model_state is not None
        with self.without_speculation(is_hidden):
            output = super().sample_tokens(grammar_output)
        if is_hidden:
            # `execute_model` saw the configuration and left this to the end of the drafting.
            self.finalize_kv_connector()
        self.adapter.finish(output)
        return output


class TreeRunnerMixin(ChainRunnerMixin):
    """Further overrides, which verify trees."""

    @_runner.overrides(
        "computes the rows with logits alone, not what vLLM's rejection sampler reads"
    )
    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        return self.adapter.spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)

    @_runner.overrides("hands the trees to the attention backend", until=TREE_MASKS)
    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built: Any = super()._build_attention_metadata(*args, **kwargs)
        hand_on(self.adapter.draft_trees(), built[0])
        return built

    @_runner.overrides("walks down the trees losslessly and puts the KV of accepted nodes in place")
    @around(sample_and_select)
    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        return self.adapter.verify(logits, spec_decode_metadata)
