"""Beams of groups in Model Runner V1: rows of the batch behind those of its requests.

vLLM keeps a state for each request, and moves it in and out of its batch. Beams have no state: the
scheduler sends their tokens and block tables with every step. They are written behind the requests
when vLLM has updated these, and taken away when the step's logits are there::

    _update_states   [ requests ... ] -> [ requests ... | beams of a group | beams of another ]
    _sample          [ requests ... ] for vLLM's sampler; the beams' rows of logits for selection
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput

from vllm_trie.hooks.ledger.record import PREFIX, TOKEN_LISTS, Result, of_beams
from vllm_trie.searches.engine.search_wire import BEAM_STEPS, SELECTIONS, BeamStep
from vllm_trie.searches.engine.worker.selection import Selector, send
from vllm_trie.searches.engine.worker.shared_prompt import share_prompts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_runner = of_beams("v1.worker.gpu_model_runner:GPUModelRunner.", TOKEN_LISTS)
_BEAMS = "_vllm_trie_beams"
"""Attribute of a model runner with its :class:`AttachedBeams`."""


class AttachedBeams:
    """Owner of the rows of a runner's batch that are beams.

    Attributes:
        selector: Selects the candidates of a step.
        places: int64 [beams] by proxy id, the rows of each group in the present step.
        steps: What the scheduler says of the groups in the present step.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self.selector = Selector(waits=True)
        self._loras: list[int] = []  # of beams alone
        self.places: dict[str, np.ndarray] = {}
        self.steps: Sequence[BeamStep] = ()
        self._scheduled: dict[str, int] = {}

    @property
    def num_beams(self) -> int:
        """The number of attached rows."""
        return sum(map(len, self.places.values()))

    def attach(self, steps: Sequence[BeamStep], scheduled: dict[str, int]) -> None:
        """Write beams behind the requests of the batch.

        Args:
            steps: Of the groups in this step.
            scheduled: Tokens of each request in this step; has the beams, too, until they are taken
                out of the batch.
        """
        runner, batch = self._runner, self._runner.input_batch
        self.steps, self._scheduled = steps, scheduled
        for step in steps:
            first = batch.num_reqs
            names = [f"{step.proxy_id}#{i}" for i in range(step.num_beams)]
            state = copy(runner.requests[step.proxy_id])
            state.output_token_ids = []  # it has one of the prompt's step
            state.num_computed_tokens = step.num_computed  # behind all images
            runner.requests.update(dict.fromkeys(names, state))
            batch._req_ids += names
            batch.req_id_to_index.update(zip(names, range(first, first + len(names)), strict=True))
            scheduled.update(dict.fromkeys(names, 1))
            self._write(step, state, first)
            self.places[step.proxy_id] = np.arange(first, first + len(names))

    def _write(self, step: BeamStep, state: CachedRequestState, first: int) -> None:
        batch: InputBatch = self._runner.input_batch
        rows = slice(first, first + step.num_beams)
        batch.token_ids_cpu[rows, step.num_computed] = step.token_ids
        batch.is_token_ids[rows, step.num_computed] = True
        batch.num_computed_tokens_cpu[rows] = step.num_computed
        for table, shared, suffix in zip(
            batch.block_table.block_tables, step.shared, step.suffix, strict=True
        ):
            end = len(shared) + suffix.shape[1]
            table.block_table.np[rows, : len(shared)] = shared
            table.block_table.np[rows, len(shared) : end] = suffix
        lora = state.lora_request
        batch.request_lora_mapping[rows] = 0 if lora is None else lora.lora_int_id
        if lora is not None and lora.lora_int_id not in batch.lora_id_to_lora_request:
            batch.lora_id_to_lora_request[lora.lora_int_id] = lora
            self._loras.append(lora.lora_int_id)

    def detach(self) -> None:
        """Take the beams out of the batch; they are its last rows."""
        batch = self._runner.input_batch
        first = batch.num_reqs - self.num_beams
        for name in batch._req_ids[first:]:
            assert name is not None
            del batch.req_id_to_index[name], self._runner.requests[name], self._scheduled[name]
        del batch._req_ids[first:]
        rows = slice(first, first + self.num_beams)
        batch.request_lora_mapping[rows] = 0
        for lora_id in self._loras:
            del batch.lora_id_to_lora_request[lora_id]
        self.places, self.steps, self._loras = {}, (), []


def beams_of(runner: GPUModelRunner) -> AttachedBeams:
    """Return the beams of a runner."""
    beams: AttachedBeams | None = vars(runner).get(_BEAMS)
    if beams is None:
        beams = vars(runner)[_BEAMS] = AttachedBeams(runner)
    return beams


@_runner.wraps(
    "_update_states", "attaches the beams of groups behind the requests, takes what is asked for"
)
def _update_states(
    original: Callable[..., Result], self: GPUModelRunner, scheduler_output: SchedulerOutput
) -> Result:
    beams = beams_of(self)
    beams.selector.selections = getattr(scheduler_output, SELECTIONS, [])
    corrections = original(self, scheduler_output)
    if steps := getattr(scheduler_output, BEAM_STEPS, ()):
        beams.attach(steps, scheduler_output.num_scheduled_tokens)
    return corrections


def without_beams(
    beams: AttachedBeams, logits: torch.Tensor, metadata: SpecDecodeMetadata | None
) -> tuple[torch.Tensor, SpecDecodeMetadata | None]:
    """Return a step's logits, and where its drafts are, of the requests alone.

    Args:
        logits: float [logits rows, vocab]; the beams have one row each, the last ones.
        metadata: vLLM's, None without drafts.
    """
    num_rows = len(logits) - beams.num_beams
    logits = logits[:num_rows]
    if metadata is None or not num_rows:
        return logits, None
    count = len(metadata.num_draft_tokens) - beams.num_beams
    return logits, replace(
        metadata,
        num_draft_tokens=metadata.num_draft_tokens[:count],
        cu_num_draft_tokens=metadata.cu_num_draft_tokens[:count],
        cu_num_sampled_tokens=metadata.cu_num_sampled_tokens[:count],
        bonus_logits_indices=metadata.bonus_logits_indices[:count],
        logits_indices=metadata.logits_indices[:num_rows],
    )


@_runner.wraps(
    "_build_attention_metadata",
    "tells the layers which beams share the slots of a prompt",
    until=PREFIX,
    platform="cpu",
)
def _build_attention_metadata(
    original: Callable[..., Result], self: GPUModelRunner, *args: object, **kwargs: object
) -> Result:
    built = original(self, *args, **kwargs)
    beams = beams_of(self)
    if beams.places and beams.num_beams == self.input_batch.num_reqs:
        share_prompts(built, beams.steps)
    return built


@_runner.wraps("_sample", "candidates of beams, out of all beams of a search")
def sample_and_select(
    original: Callable[..., SamplerOutput],
    self: GPUModelRunner,
    logits: torch.Tensor,
    spec_decode_metadata: Any,
) -> SamplerOutput:
    """Select candidates next to the sampler, which sees requests only."""
    beams = beams_of(self)
    num_selected = 0
    if beams.selector.selections:
        # Before the sampler, which may change logits in place.
        row_of = self.input_batch.req_id_to_index
        if spec_decode_metadata is not None:  # a request has a row for each of its drafts, too
            rows = np.cumsum([0, *(1 + n for n in spec_decode_metadata.num_draft_tokens)])
            row_of = dict(zip(self.input_batch.req_ids, rows.tolist(), strict=False))
        further = len(logits) - self.input_batch.num_reqs
        rows_of_beams = {name: rows + further for name, rows in beams.places.items()}
        num_selected = beams.selector.select(row_of, logits, rows_of_beams)
    if beams.places:
        logits, spec_decode_metadata = without_beams(beams, logits, spec_decode_metadata)
        beams.detach()
    needs_sampler = num_selected < len(logits) or self.speculative_config is not None
    if len(logits) and needs_sampler:
        return original(self, logits, spec_decode_metadata)
    # Nobody else's tokens to sample.
    tokens = torch.zeros((len(logits), 1), dtype=torch.int32, device=logits.device)
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)


@_runner.wraps("sample_tokens", "sends the candidates to the scheduler")
def sample_tokens(
    original: Callable[..., Result], self: GPUModelRunner, *args: object, **kwargs: object
) -> Result:
    output = original(self, *args, **kwargs)
    selector = beams_of(self).selector
    if selector.selected:
        send(selector.selected, output)
        selector.selected = []
    return output
