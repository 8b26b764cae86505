"""Candidates of searches on Model Runner V2, chosen next to its samplers.

The selection waits for the device once for each group and step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_trie.vllm_hooks.beam_wire import SELECTIONS
from vllm_trie.vllm_hooks.worker.beam.beams_v2 import BeamSlots, slots_of
from vllm_trie.vllm_hooks.worker.beam.selection import STATE, Selector

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

_BEAMS = "_vllm_trie_beams"
"""Attribute of a sampler with the :class:`BeamSlots` of its runner."""


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the beams of groups, and let the samplers know what to select."""

    @functools.wraps(original)
    def execute_model(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        selections = getattr(scheduler_output, SELECTIONS, None)
        if self.sampler is not None and (selections or STATE in vars(self.sampler)):
            sampler = vars(self.sampler)
            sampler.setdefault(STATE, Selector()).selections = selections or []
            sampler[_BEAMS] = slots_of(self)
        return original(self, slots_of(self).add_to(scheduler_output), *args, **kwargs)

    return execute_model


def wrap_sampler(original: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
    """Select the candidates of searches next to a sampler, vLLM's own or one of drafts."""

    @functools.wraps(original)
    def call(
        self: Any, logits: torch.Tensor, input_batch: InputBatch, *args: Any, **kwargs: Any
    ) -> SamplerOutput:
        sampler = getattr(self, "sampler", self)  # one of drafts has vLLM's own
        state: Selector | None = getattr(sampler, STATE, None)
        if state is not None and state.selections:
            # Before the sampler, which may change logits in place.
            beams: BeamSlots = getattr(sampler, _BEAMS)
            rows = input_batch.cu_num_logits_np.tolist()
            row_of = dict(zip(input_batch.req_ids, rows, strict=False))
            state.select(row_of, logits, beams.places(input_batch))
        return original(self, logits, input_batch, *args, **kwargs)

    return call


def wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send the candidates of searches with the output of the step."""

    @functools.wraps(original)
    def sample_tokens(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        state = vars(self.sampler).get(STATE) if self.sampler is not None else None
        if state is not None:
            state.send(getattr(output, "model_runner_output", output))
        return output

    return sample_tokens
