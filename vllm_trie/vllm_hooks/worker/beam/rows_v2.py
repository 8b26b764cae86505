"""Candidates of rows on Model Runner V2: with a bias, a mask, a grammar or a catalogue.

Other rows take the log-probabilities of vLLM's sampler there, which reach the host without a wait.
The selection here waits once for each group and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_trie.vllm_hooks.scheduler.row_steps import ROW_STEPS
from vllm_trie.vllm_hooks.worker.beam.item_rows import STATE, WorkerRows

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the runner's sampler know what the scheduler says of rows."""

    @functools.wraps(original)
    def execute_model(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        sampler = vars(self.sampler) if self.sampler is not None else {}
        steps = getattr(scheduler_output, ROW_STEPS, None)
        if steps or STATE in sampler:
            sampler.setdefault(STATE, WorkerRows()).steps = steps or []
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def wrap_sampler(original: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
    """Select the candidates of rows next to the sampler."""

    @functools.wraps(original)
    def call(self: Sampler, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        state: WorkerRows | None = vars(self).get(STATE)
        if state is None or not state.steps:
            return original(self, logits, input_batch)
        # Before the sampler, which may change logits in place.
        state.select({name: i for i, name in enumerate(input_batch.req_ids)}, logits)
        output = original(self, logits, input_batch)
        state.put_best_tokens(output.sampled_token_ids)
        return output

    return call


def wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send the candidates of rows with the output of the step."""

    @functools.wraps(original)
    def sample_tokens(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        state = vars(self.sampler).get(STATE) if self.sampler is not None else None
        if state is not None:
            state.send(getattr(output, "model_runner_output", output))
        return output

    return sample_tokens
