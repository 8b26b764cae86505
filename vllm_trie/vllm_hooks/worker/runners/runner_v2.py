"""Speculation in stock vLLM's Model Runner V2: overrides that call the adapter.

:class:`RunnerV2Mixin` comes before the runner's class in the subclasses of
:mod:`~vllm_trie.vllm_hooks.worker.cpu_worker` and :mod:`~vllm_trie.vllm_hooks.worker.cuda_worker`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.setup.draft_support import check_states
from vllm_trie.vllm_hooks.worker.drafting.proposer import TreeProposer
from vllm_trie.vllm_hooks.worker.runners.v2_adapter import V2Adapter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
    from vllm.v1.worker.gpu.states import RequestState
else:
    _Runner = object


logger = init_logger(__name__)


class HostSpeculator(BaseSpeculator):
    """The plugin's drafter where the runner expects a draft model."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        self.adapter = _make_adapter(vllm_config, device, req_states)
        self._num_tokens = req_states.num_speculative_steps
        # vLLM's name for CUDA graphs of drafts of any length, and for step costs from these graphs.
        # It reads the confidences in steps of its warm-up, and trims nothing.
        self.enable_adaptive_verification = (
            vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            and vllm_config.parallel_config.pipeline_parallel_size == 1
        )
        self.draft_token_confidence_probs = torch.ones(
            req_states.max_num_reqs, self._num_tokens, device=device
        )

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: drafters run on the host."""

    def capture(self) -> None:
        """Do nothing: drafters run on the host."""

    def prepare_watermarking(self, *unused: Any) -> None:
        """Do nothing: drafts carry no watermark, the target's tokens do."""

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        *unused: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **unused_too: Any,
    ) -> torch.Tensor:
        """Return the draft tokens of each request, int64 [requests, N]."""
        if dummy_run:
            return input_batch.idx_mapping.new_zeros((input_batch.num_reqs, self._num_tokens))
        max_nodes = self._num_tokens if num_speculative_tokens is None else num_speculative_tokens
        return self.adapter.propose(input_batch, last_hidden_states, max_nodes)


def _make_adapter(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> V2Adapter:
    trees = TreeProposer(vllm_config).trees
    adapter = V2Adapter
    if config.verification(vllm_config) == "tree":
        # Imports much of Model Runner V2, and every worker imports this module.
        from vllm_trie.vllm_hooks.worker.runners.v2_trees import V2TreeAdapter

        adapter = V2TreeAdapter
    return adapter(trees, req_states, device)


class RunnerV2Mixin(_Runner):
    """Overrides of Model Runner V2 that draft; everything else stays vLLM's.

    For ranks of the last pipeline stage, which has the speculator.
    """

    speculator: Any
    """A :class:`HostSpeculator`, or with a trained drafter vLLM's own."""
    _rows_of_requests: np.ndarray | None = None  # of the step that is prepared

    @property
    def adapter(self) -> V2Adapter:
        adapter: V2Adapter = self.speculator.adapter
        return adapter

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.adapter.trees.guard.drafter.load_model(self.model)
        self.adapter.attach(self)

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: Any = None,
    ) -> None:
        arguments = kv_cache_config, is_profiling, kv_cache_allocation_context
        check_states(kv_cache_config)
        try:
            super().initialize_kv_cache(*arguments)
        except ValueError as error:
            if not getattr(self.speculator, "enable_adaptive_verification", False):
                raise
            logger.info("vllm-trie: CUDA graphs take drafts of one length only: %s", error)
            self.speculator.enable_adaptive_verification = False
            super().initialize_kv_cache(*arguments)
        if not is_profiling:  # that cache is released again
            self.adapter.attach_cache()

    @torch.inference_mode()
    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Let vLLM's memory profiling see the logits of a step with full drafts.

        vLLM gives the KV cache all memory that profiling left, and profiles one row of logits for
        each request. Verification copies them in float32, a part of bounded size at a time.
        """
        super()._dummy_sampler_run(hidden_states)
        rows = min(self.max_num_tokens, self.max_num_reqs * self.decode_query_len)
        model: Any = self.model
        logits = model.compute_logits(hidden_states.new_zeros(rows, hidden_states.shape[1]))
        logits[: get_max_chunk_logits(logits.shape[1])].to(torch.float32, copy=True)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().finish_requests(scheduler_output)
        self.adapter.release(scheduler_output.finished_req_ids)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        self.adapter.add_requests(scheduler_output.scheduled_new_reqs)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.adapter.draft()
        scheduler_output = self.adapter.fit(scheduler_output)
        if self.adapter.is_drafting and scheduler_output.num_scheduled_tokens:
            self.adapter.trees.start_step(len(scheduler_output.num_scheduled_tokens))
        return super().execute_model(scheduler_output, *args, **kwargs)

    def take_draft_token_ids(self) -> Any:
        self.adapter.draft()
        return super().take_draft_token_ids()

    def prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        manager = self.cudagraph_manager
        if manager is not None and manager.varlen_decode and not batch.has_prefill:
            # A graph of drafts of any length was captured for this one; kernels may plan by it.
            batch.max_query_len = self.decode_query_len
        self._rows_of_requests = np.diff(batch.cu_num_logits_np)
        if self.adapter.is_drafting:
            self.adapter.begin_step(scheduler_output, batch.req_ids)
        return batch

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        prepared = super().prepare_attn(input_batch)
        if self.adapter.is_drafting:
            self.adapter.place(input_batch, prepared[1])
        return prepared

    def _set_active_loras(
        self, prompt_lora_mapping: tuple[int, ...], *args: Any, **kwargs: Any
    ) -> None:
        # vLLM names the adapter of each request, where its layers take that of each logits row.
        rows, self._rows_of_requests = self._rows_of_requests, None
        if rows is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, rows).tolist())
        super()._set_active_loras(prompt_lora_mapping, *args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        sampled = super().sample(*args, **kwargs)
        self.adapter.keep_sampled(sampled[0].sampled_token_ids, sampled[1])
        return sampled

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(self.adapter.fit_masks(grammar_output))
        if output is not None:
            self.adapter.finish(output)
        return output


def wrap_init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the plugin's speculator, or take in vLLM's; in place only while a worker makes its
    runner."""

    @functools.wraps(original)
    def init_speculator(
        vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> Any:
        tree_config = config.read(vllm_config)
        if tree_config is None or tree_config.neural is None:
            return HostSpeculator(vllm_config, device, req_states)
        speculator = original(vllm_config, device, req_states)
        speculator.adapter = _make_adapter(vllm_config, device, req_states)
        speculator.adapter.take_neural_drafter(speculator)
        return speculator

    return init_speculator


def wrap_use_ngram(original: Callable[..., bool]) -> Callable[..., bool]:
    """Keep the runner from holding every request's text on the device, for vLLM's own n-grams."""

    @functools.wraps(original)
    def use_ngram(self: Any) -> bool:
        return False

    return use_ngram
