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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.async_utils import stream

from vllm_trie.attention.device_copy import to_device
from vllm_trie.hooks.ledger.record import TOKEN_LISTS, Result, of_beams
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.hooks.wire import internal_params
from vllm_trie.searches.device_beams import move_rows
from vllm_trie.searches.engine.search_wire import BEAM_STEPS, SELECTIONS, BeamStep, block_pairs
from vllm_trie.searches.engine.worker.device_copies import BlockCopier, warm_up
from vllm_trie.searches.engine.worker.selection import Selector, send

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
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
_BEAM_PARAMS = internal_params(1)


@dataclass
class _Group:
    """The slots of a group.

    Attributes:
        names: Of its beams.
        delta: Of M-RoPE's positions behind the prompt.
        indices: int64 [beams], their slots; None where they are not known.
        shared: By KV cache group the blocks of the prompt that the first `num_shared` slots have.
    """

    names: list[str] = field(default_factory=list)
    delta: int = 0
    indices: np.ndarray | None = None
    shared: tuple[np.ndarray, ...] = ()
    num_shared: int = 0

    def lacks(self, step: BeamStep) -> bool:
        """Return whether a slot of a step has other blocks of the prompt, and note that it gets
        those of the step."""
        lacks = step.num_beams > self.num_shared or not all(
            map(np.array_equal, self.shared, step.shared)
        )
        if lacks:
            self.shared, self.num_shared = step.shared, step.num_beams
        return lacks


class BeamSlots:
    """Owner of the slots of a runner's request states that are beams.

    Attributes:
        selector: Of their candidates.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._groups: dict[str, _Group] = {}  # by proxy id
        self.selector = Selector(waits=False)
        self._steps: Sequence[BeamStep] = ()
        self._copies: Sequence[KVCacheBlockCopy] = ()

    @functools.cached_property
    def _copier(self) -> BlockCopier:
        return BlockCopier(self._runner.kv_caches, self._runner.kv_cache_config.num_blocks)

    @property
    def _rope(self) -> RopeState | None:
        return getattr(self._runner.model_state, "rope_state", None)

    def add_to(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Return a step with the beams of its groups, for which slots are added and removed."""
        self._steps = steps = getattr(scheduler_output, BEAM_STEPS, ())
        self._copies = ()
        ended = self._groups.keys() & scheduler_output.finished_req_ids
        if not steps and not ended:
            return scheduler_output
        result = copy(scheduler_output)
        result.finished_req_ids = {*scheduler_output.finished_req_ids}
        result.scheduled_new_reqs = [*scheduler_output.scheduled_new_reqs]
        result.num_scheduled_tokens = {**scheduler_output.num_scheduled_tokens}
        if steps:
            self._copies = scheduler_output.kv_cache_block_copies or ()
            result.kv_cache_block_copies = None
        for proxy_id in ended:
            result.finished_req_ids.update(self._groups.pop(proxy_id).names)
            self.selector.parts.beams.pop(proxy_id, None)
        for step in steps:
            group = self._groups.get(step.proxy_id)
            if group is None:
                group = self._groups[step.proxy_id] = _Group()
                if self._rope is not None:
                    index = self._runner.req_states.req_id_to_index[step.proxy_id]
                    group.delta = self._rope.prefill_delta.np[index]
                result.finished_req_ids.add(step.proxy_id)
            names = group.names
            num_groups = len(step.shared)
            for i in range(len(names), step.num_beams):
                names.append(f"{step.proxy_id}#{i}")
                result.scheduled_new_reqs.append(
                    NewRequestData(
                        req_id=names[-1],
                        prompt_token_ids=_PREFILLED,
                        mm_features=[],
                        sampling_params=_BEAM_PARAMS,
                        pooling_params=None,
                        block_ids=tuple([] for _ in range(num_groups)),
                        num_computed_tokens=len(_PREFILLED),
                        lora_request=step.lora_request,
                        prefill_token_ids=_PREFILLED,
                    )
                )
                group.indices = None
            names = names[: step.num_beams]
            result.num_scheduled_tokens.update(dict.fromkeys(names, 1))
        return result

    def write(self) -> None:
        """Write the beams of the step into their slots, when the runner's requests are updated."""
        # All searches at once: whatever the device does, each call takes the host its time.
        if self._copies:
            copies = np.ascontiguousarray(block_pairs(self._copies).T)
            self._copier.copy(to_device(copies, self._runner.device))
        if sent := [step for step in self._steps if step.token_ids is not None]:
            self._write_sent(sent)
        if ahead := [step for step in self._steps if step.token_ids is None]:
            self._write_children(ahead)

    def _write_sent(self, steps: Sequence[BeamStep]) -> None:
        """Write beams that the scheduler sends."""
        tables = self._runner.block_tables
        indices = [self._indices_of(step) for step in steps]
        lacking = [self._groups[step.proxy_id].lacks(step) for step in steps]
        arrays = [np.concatenate([step.token_ids for step in steps])]
        for i, table in enumerate(tables.block_tables):
            of_cells, block_ids = [], []
            for step, of_step, lacks in zip(steps, indices, lacking, strict=True):
                shared, suffix = step.shared[i], step.suffix[i]
                first, end = 0 if lacks else len(shared), len(shared) + suffix.shape[1]
                missing = np.broadcast_to(shared[first:], (len(of_step), len(shared) - first))
                block_ids.append(np.concatenate([missing, suffix], axis=1).ravel())
                rows = of_step[:, None] * table.gpu.shape[1]
                of_cells.append((rows + np.arange(first, end)).ravel())
                tables.num_blocks.np[i, of_step] = end
            arrays += [np.concatenate(of_cells), np.concatenate(block_ids)]
        slots, token_ids, *blocks = self._write_lengths(steps, np.concatenate(indices), arrays)
        self._runner.req_states.last_sampled_tokens[:, 0].index_copy_(0, slots, token_ids)
        for i, table in enumerate(tables.block_tables):
            cells, values = blocks[2 * i : 2 * i + 2]
            table.gpu.view(-1).index_copy_(0, cells, values.int())

    def _write_children(self, steps: Sequence[BeamStep]) -> None:
        """Write the children that the device has chosen, and copy the tails of those that move."""
        runner, tables = self._runner, self._runner.block_tables
        indices = np.concatenate([self._indices_of(step) for step in steps])
        counts = [step.num_beams for step in steps]
        arrays = [np.repeat(np.cumsum(counts) - counts, counts)]
        ends = []
        for i in range(len(tables.block_tables)):
            num_fresh = np.repeat([step.suffix[i].shape[1] for step in steps], counts)
            fresh = np.full(len(indices), -1)
            fresh[num_fresh > 0] = np.concatenate([step.suffix[i].ravel() for step in steps])
            tables.num_blocks.np[i, indices] += num_fresh
            tails = tables.num_blocks.np[i, indices] - 1
            ends.append(int(tails.max()) + 1)
            arrays += [tails, fresh]
        slots, firsts, *blocks = self._write_lengths(steps, indices, arrays)
        children = [self.selector.parts.beams[step.proxy_id] for step in steps]
        sources = slots[torch.cat([part.sources for part in children]) + firsts]
        targets = slots[torch.cat([part.places for part in children]) + firsts]
        token_ids = torch.cat([part.token_ids for part in children])
        runner.req_states.last_sampled_tokens[:, 0].index_copy_(0, targets, token_ids)
        copies = [
            move_rows(table.gpu[:, :end], sources, targets, *blocks[2 * i : 2 * i + 2])
            for i, (table, end) in enumerate(zip(tables.block_tables, ends, strict=True))
        ]
        self._copier.copy(torch.cat(copies, dim=1))

    def _write_lengths(
        self, steps: Sequence[BeamStep], indices: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> Sequence[torch.Tensor]:
        """Write the lengths of beams with int64 [beams] slots; return slots and arrays as int64 on
        the device, with one copy."""
        states, device = self._runner.req_states, self._runner.device
        counts = [step.num_beams for step in steps]
        num_computed = np.repeat([step.num_computed for step in steps], counts)
        states.num_computed_tokens_np[indices] = num_computed
        arrays = [indices, num_computed, *arrays]
        together = to_device(np.concatenate(arrays), device)
        slots, lengths, *rest = together.split([len(array) for array in arrays])
        states.num_computed_tokens.gpu.index_copy_(0, slots, lengths.int())
        states.total_len.gpu.index_fill_(0, slots, len(_PREFILLED))
        return [slots, *rest]

    def _indices_of(self, step: BeamStep) -> np.ndarray:
        """Return int64 [beams], the slots of a group's beams."""
        group = self._groups[step.proxy_id]
        if group.indices is None:
            index_of = self._runner.req_states.req_id_to_index
            group.indices = np.array([index_of[name] for name in group.names])
            if self._rope is not None:
                self._rope.prefill_delta.np[group.indices] = group.delta
                self._rope.prefill_delta.copy_to_uva()
        return group.indices[: step.num_beams]

    def select(self, logits: torch.Tensor, batch: InputBatch) -> None:
        """Start the selection of the step's candidates, and their copies to the host.

        The copies come before those of vLLM's own output in the same stream: who waits for these
        has them, too.

        Args:
            logits: float [logits rows, vocab], before sampling.
        """
        if not self.selector.selections:
            return
        first_rows = dict(zip(batch.req_ids, batch.cu_num_logits_np.tolist(), strict=False))
        rows_of_beams = {
            step.proxy_id: np.array(
                [first_rows[name] for name in self._groups[step.proxy_id].names[: step.num_beams]]
            )
            for step in self._steps
        }
        self.selector.select(first_rows, logits, rows_of_beams)
        main, copies = self._runner.main_stream, self._runner.output_copy_stream
        with stream(copies, main):
            copies.wait_stream(main)
            self.selector.selected = [each.copied() for each in self.selector.selected]


def beams_of(runner: GPUModelRunner) -> BeamSlots:
    """Return the beams of a runner."""
    beams: BeamSlots | None = vars(runner).get(_BEAMS)
    if beams is None:
        beams = vars(runner)[_BEAMS] = BeamSlots(runner)
        if reason_off(runner.vllm_config) is None:
            warm_up(runner.device)
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
    selected: Sequence[Unfetched[dict[str, StepCandidates]]], get_output: Callable[[], Any]
) -> Any:
    """Return a step's output with the candidates, whose copies came before those of its own."""
    output = get_output()
    send(selected, output)
    return output
