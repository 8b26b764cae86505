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
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_trie.vllm_hooks.setup import config
from vllm_trie.vllm_hooks.worker.drafting.proposer import TreeProposer
from vllm_trie.vllm_hooks.worker.runners.v2_adapter import V2Adapter

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as _Runner
    from vllm.v1.worker.gpu.states import RequestState
else:
    _Runner = object


class HostSpeculator(BaseSpeculator):
    """The plugin's drafter where the runner expects a draft model."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        self.adapter = _make_adapter(vllm_config, device, req_states)
        self._num_tokens = req_states.num_speculative_steps

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: drafters run on the host."""

    def capture(self) -> None:
        """Do nothing: drafters run on the host."""

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
    trees.budget = None
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

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        self.adapter.attach_cache(self)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().finish_requests(scheduler_output)
        self.adapter.release(scheduler_output.finished_req_ids)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        self.adapter.add_requests(scheduler_output.scheduled_new_reqs)

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        self.adapter.trees.start_step(len(scheduler_output.num_scheduled_tokens))
        return super().execute_model(scheduler_output, *args, **kwargs)

    def prepare_inputs(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        self._rows_of_requests = np.diff(batch.cu_num_logits_np)
        self.adapter.begin_step(scheduler_output, batch.req_ids)
        return batch

    def prepare_attn(self, input_batch: InputBatch) -> Any:
        prepared = super().prepare_attn(input_batch)
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
        output = super().sample_tokens(grammar_output)
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
