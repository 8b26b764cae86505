"""Beams of groups in Model Runner V2: slots of its request states that stand for no request.

The runner keeps tokens, lengths and block tables of requests on the device. A group gets a slot for
each beam with its first step, and gives the slot of its proxy back. With every step the beams'
tokens and block tables are written into the slots at once: those that the scheduler sends, or those
of the children that the device has chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.async_utils import stream

from vllm_trie.attention.device_copy import to_device
from vllm_trie.hooks.ledger.record import TOKEN_LISTS, Result, of_beams
from vllm_trie.hooks.wire import internal_params
from vllm_trie.searches.device_beams import DeviceBeams
from vllm_trie.searches.engine.search_wire import BEAM_STEPS, SELECTIONS, BeamStep
from vllm_trie.searches.engine.worker.selection import Selector, send

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.mm.rope import RopeState
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from vllm_trie.searches.engine.constraint import StepCandidates
    from vllm_trie.searches.unfetched import Unfetched

_v2 = of_beams("v1.worker.gpu.", TOKEN_LISTS)
_RUNNER = "model_runner:GPUModelRunner."
_SELECTS = "candidates of beams, out of all beams of a search"
_BEAMS = "_vllm_trie_beams"
"""Attribute of a model runner, and of its sampler, with its :class:`BeamSlots`."""
_PREFILLED = [0]
"""Tokens that a beam has for the runner, whatever its text: it decodes, and prefills nothing."""


class BeamSlots:
    """Owner of the slots of a runner's request states that are beams.

    Attributes:
        selector: Of their candidates.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._names: dict[str, list[str]] = {}  # by proxy id
        self._indices: dict[str, np.ndarray] = {}
        self._deltas: dict[str, int] = {}  # of M-RoPE's positions behind the prompt
        self._on_device: dict[str, DeviceBeams] = {}
        self.selector = Selector(waits=False, beams=self._on_device)
        self._steps: Sequence[BeamStep] = ()

    @property
    def _rope(self) -> RopeState | None:
        return getattr(self._runner.model_state, "rope_state", None)

    def add_to(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Return a step with the beams of its groups, for which slots are added and removed."""
        self._steps = steps = getattr(scheduler_output, BEAM_STEPS, ())
        ended = self._names.keys() & scheduler_output.finished_req_ids
        if not steps and not ended:
            return scheduler_output
        result = copy(scheduler_output)
        result.finished_req_ids = {*scheduler_output.finished_req_ids}
        result.scheduled_new_reqs = [*scheduler_output.scheduled_new_reqs]
        result.num_scheduled_tokens = {**scheduler_output.num_scheduled_tokens}
        for proxy_id in ended:
            result.finished_req_ids.update(self._names.pop(proxy_id))
            self._indices.pop(proxy_id, None)
            self._deltas.pop(proxy_id, None)
            self._on_device.pop(proxy_id, None)
        for step in steps:
            if step.proxy_id not in self._names:
                self._names[step.proxy_id] = []
                if self._rope is not None:
                    index = self._runner.req_states.req_id_to_index[step.proxy_id]
                    self._deltas[step.proxy_id] = self._rope.prefill_delta.np[index]
                result.finished_req_ids.add(step.proxy_id)
            names = self._names[step.proxy_id]
            num_groups = len(step.shared)
            for i in range(len(names), step.num_beams):
                names.append(f"{step.proxy_id}#{i}")
                result.scheduled_new_reqs.append(
                    NewRequestData(
                        req_id=names[-1],
                        prompt_token_ids=_PREFILLED,
                        mm_features=[],
                        sampling_params=internal_params(1),
                        pooling_params=None,
                        block_ids=tuple([] for _ in range(num_groups)),
                        num_computed_tokens=len(_PREFILLED),
                        lora_request=step.lora_request,
                        prefill_token_ids=_PREFILLED,
                    )
                )
                self._indices.pop(step.proxy_id, None)
            names = names[: step.num_beams]
            result.num_scheduled_tokens.update(dict.fromkeys(names, 1))
        return result

    def write(self) -> None:
        """Write the beams of the step into their slots, when the runner's requests are updated."""
        states, tables = self._runner.req_states, self._runner.block_tables
        device = self._runner.device
        for step in self._steps:
            indices = self._indices_of(step)
            slots = to_device(indices, device)
            if step.token_ids is None:
                beams = self._on_device[step.proxy_id]
                num_blocks = self._runner.kv_cache_config.num_blocks
                beams.take_children(step.suffix, self._runner.kv_caches, num_blocks)
            else:
                beams = DeviceBeams(step.token_ids, step.suffix, device)
                self._on_device[step.proxy_id] = beams
            states.num_computed_tokens_np[indices] = step.num_computed
            states.num_computed_tokens.gpu.index_fill_(0, slots, step.num_computed)
            states.total_len.gpu.index_fill_(0, slots, len(_PREFILLED))
            states.last_sampled_tokens[slots, 0] = beams.token_ids
            for i, (shared, suffix) in enumerate(zip(step.shared, beams.suffix, strict=True)):
                first, end = len(shared), len(shared) + suffix.shape[1]
                table = tables.block_tables[i].gpu
                if step.token_ids is not None:
                    table[slots, :first] = to_device(shared, device)
                table[slots, first:end] = suffix
                tables.num_blocks.np[i, indices] = end

    def _indices_of(self, step: BeamStep) -> np.ndarray:
        """Return int64 [beams], the slots of a group's beams."""
        indices = self._indices.get(step.proxy_id)
        if indices is None:
            names, index_of = self._names[step.proxy_id], self._runner.req_states.req_id_to_index
            indices = self._indices[step.proxy_id] = np.array([index_of[name] for name in names])
            if self._rope is not None:
                self._rope.prefill_delta.np[indices] = self._deltas[step.proxy_id]
                self._rope.prefill_delta.copy_to_uva()
        return indices[: step.num_beams]

    def select(self, logits: torch.Tensor, batch: InputBatch) -> None:
        """Start the selection of the step's candidates, and their copies to the host.

        The copies come before those of vLLM's own output in the same stream: who waits for these
        has them, too.

        Args:
            logits: float [logits rows, vocab], before sampling.
            batch: The batch.
        """
        if not self.selector.selections:
            return
        first_rows = dict(zip(batch.req_ids, batch.cu_num_logits_np.tolist(), strict=False))
        rows_of_beams = {
            step.proxy_id: np.array(
                [first_rows[name] for name in self._names[step.proxy_id][: step.num_beams]]
            )
            for step in self._steps
        }
        self.selector.select(first_rows, logits, rows_of_beams)
        main, copies = self._runner.main_stream, self._runner.output_copy_stream
        with stream(copies, main):
            copies.wait_stream(main)
            self.selector.selected = [each and each.copied() for each in self.selector.selected]


def beams_of(runner: GPUModelRunner) -> BeamSlots:
    """Return the beams of a runner."""
    beams: BeamSlots | None = vars(runner).get(_BEAMS)
    if beams is None:
        beams = vars(runner)[_BEAMS] = BeamSlots(runner)
    return beams


@_v2.wraps(f"{_RUNNER}update_requests", "writes the tokens and block tables of beams")
def update_requests(
    original: Callable[..., None], self: GPUModelRunner, scheduler_output: SchedulerOutput
) -> None:
    original(self, scheduler_output)
    beams_of(self).write()


@_v2.wraps(f"{_RUNNER}execute_model", "adds the beams of groups, takes what the scheduler asks for")
def execute_model(
    original: Callable[..., Result],
    self: GPUModelRunner,
    scheduler_output: SchedulerOutput,
    *args: object,
    **kwargs: object,
) -> Result:
    """Add the beams of groups, and let the samplers know what to select."""
    beams = beams_of(self)
    beams.selector.selections = getattr(scheduler_output, SELECTIONS, [])
    if self.sampler is not None:
        vars(self.sampler)[_BEAMS] = beams
    return original(self, beams.add_to(scheduler_output), *args, **kwargs)


@_v2.wraps("sample.sampler:Sampler.__call__", _SELECTS)
@_v2.wraps("spec_decode.rejection_sampler:RejectionSampler.__call__", _SELECTS)
def sample_and_select(
    original: Callable[..., SamplerOutput],
    self: object,
    logits: torch.Tensor,
    input_batch: InputBatch,
    *args: object,
    **kwargs: object,
) -> SamplerOutput:
    """Select the candidates of searches next to a sampler, vLLM's own or one of drafts."""
    sampler = getattr(self, "sampler", self)  # one of drafts has vLLM's own
    beams: BeamSlots | None = getattr(sampler, _BEAMS, None)
    if beams is not None:
        beams.select(logits, input_batch)  # first: the sampler may change logits in place
    return original(self, logits, input_batch, *args, **kwargs)


@_v2.wraps(f"{_RUNNER}sample_tokens", "sends the candidates with the output of the step")
def sample_tokens(
    original: Callable[..., Any], self: GPUModelRunner, *args: object, **kwargs: object
) -> Any:
    output = original(self, *args, **kwargs)
    selector = beams_of(self).selector
    if selector.selected:
        output.get_output = functools.partial(_with, selector.selected, output.get_output)
        selector.selected = []
    return output


def _with(
    selected: Sequence[Unfetched[StepCandidates] | None], get_output: Callable[[], Any]
) -> Any:
    """Return a step's output with the candidates, whose copies came before those of its own."""
    output = get_output()
    send(selected, output)
    return output
