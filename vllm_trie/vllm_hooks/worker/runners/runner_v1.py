"""Speculation in stock vLLM's Model Runner V1: overrides that call the adapter.

The mixins come before the runner's class in the subclasses of
:mod:`~vllm_trie.vllm_hooks.worker.cpu_worker` and :mod:`~vllm_trie.vllm_hooks.worker.cuda_worker`:
:class:`ChainRunnerMixin` where vLLM verifies the drafts, :class:`TreeRunnerMixin` where the plugin
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from vllm_trie.vllm_hooks.worker.attention.tree_attention import TREE_ATTRIBUTE
from vllm_trie.vllm_hooks.worker.drafting.neural import StepStates
from vllm_trie.vllm_hooks.worker.drafting.proposer import TreeProposer
from vllm_trie.vllm_hooks.worker.runners.v1_adapter import V1Adapter, V1TreeAdapter
from vllm_trie.vllm_hooks.worker.verifier import TreeVerifier

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, SamplerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    _Runner = object


class ChainRunnerMixin(_Runner):
    """Overrides of ``GPUModelRunner`` that draft; everything else stays vLLM's.

    vLLM asks for a step's drafts before it returns the step's tokens, and takes them after it has
    sent the tokens off. Drafts are made when they are taken, so that no answer waits for them.
    Those of a trained drafter are made when they are asked for: it reads the step's metadata.
    """

    _deferred_draft: Callable[[], list[list[int]]] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.has_neural_drafter and self.speculative_config is not None:
            # Drafting waits for the step's tokens on the host. Not in the configuration from the
            # beginning: draft models refuse it there, though not for drafts made this way.
            self.speculative_config.disable_padded_drafter_batch = True

    @property
    def has_neural_drafter(self) -> bool:
        """Whether ``drafter`` is vLLM's own proposer, for a trained drafter in a union."""
        return not isinstance(getattr(self, "drafter", None), TreeProposer)

    @cached_property
    def tree_proposer(self) -> TreeProposer:
        """The plugin's proposer, which vLLM makes itself where it is the only one."""
        if self.has_neural_drafter:
            return TreeProposer(self.vllm_config)
        return cast("TreeProposer", self.drafter)

    @property
    def trees(self) -> TreeVerifier:
        """The verifier, which the proposer made."""
        return self.tree_proposer.trees

    @cached_property
    def adapter(self) -> V1Adapter:
        return V1Adapter(self, self.trees)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.has_neural_drafter:
            self.tree_proposer.load_model(self.get_model())
            self.adapter.take_neural_drafter(self.drafter)

    @contextmanager
    def without_speculation(self, hidden: bool = True) -> Iterator[None]:
        """Let a method of vLLM's take the path of an engine without speculation, if `hidden`.

        ``speculative_config`` is vLLM's only switch, and it is the engine's, not the step's. With
        it, ``_prepare_inputs`` describes drafts that are not there, and ``sample_tokens`` sends the
        scheduler empty drafts of each request, or drafts of zeros if ``_input_fits_in_drafter``
        says no. On a small model this is a noticeable part of a step.
        """
        config = self.speculative_config
        if hidden:
            self.speculative_config = None
        try:
            yield
        finally:
            self.speculative_config = config

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self.adapter.release(req_id)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # Limits are kept per request. vLLM's answer is for the whole batch: one request near the
        # length limit would cost all others their drafts.
        return True

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.adapter.start_step()
        return super().execute_model(*args, **kwargs)

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        with self.without_speculation(not scheduler_output.scheduled_spec_decode_tokens):
            prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.adapter.begin_step(scheduler_output)
        return prepared

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None = None,
        spec_decode_metadata: Any = None,
        common_attn_metadata: Any = None,
        *unused: Any,
        **unused_too: Any,
    ) -> list[list[int]]:
        self.adapter.end_step(sampled_token_ids)
        draft = partial(
            self.adapter.draft, scheduler_output, sampled_token_ids, sample_hidden_states
        )
        if self.has_neural_drafter:
            return draft(StepStates(hidden_states, aux_hidden_states, common_attn_metadata))
        self._deferred_draft = draft
        return [[] for _ in sampled_token_ids]

    @torch.inference_mode()
    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if self._deferred_draft is not None:
            self._draft_token_ids = self._deferred_draft()
            self._deferred_draft = None
        return super().take_draft_token_ids()

    def sample_tokens(self, grammar_output: Any) -> Any:  # type: ignore[override]
        is_hidden = self.trees.is_pausing and self.execute_model_state is not None
        # A trained drafter's KV cache goes on in such steps.
        is_hidden = is_hidden and not self.has_neural_drafter
        with self.without_speculation(is_hidden):
            output = super().sample_tokens(grammar_output)
        if is_hidden:
            # `execute_model` saw the configuration and left this to the end of the drafting.
            self.finalize_kv_connector()
        self.adapter.finish(output)
        return output


class TreeRunnerMixin(ChainRunnerMixin):
    """Further overrides, which verify trees."""

    @cached_property
    def adapter(self) -> V1Adapter:
        return V1TreeAdapter(self, self.trees)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.adapter.check_layers()

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        return self.adapter.logits_metadata(num_draft_tokens, cu_num_scheduled_tokens)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        built: Any = super()._build_attention_metadata(*args, **kwargs)
        if self.trees.tree_batch is not None:
            for metadata in {id(m): m for m in built[0].values()}.values():
                setattr(metadata, TREE_ATTRIBUTE, self.trees.tree_batch)
        return built

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        return self.adapter.sample(logits, spec_decode_metadata)
