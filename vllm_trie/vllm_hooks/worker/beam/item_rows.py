"""Candidates of rows in the worker: out of all rows of a search, or from their catalogues.

vLLM's sampler returns the best tokens of each row over the whole vocabulary. A search without rules
of its own needs few of them. After a bias or a mask, and of the 2,000 valid children in a
catalogue, none may be among them, and it cannot be told which tokens to choose from:
`allowed_token_ids` concerns sampling, not log-probabilities, and `logprob_token_ids` is a list of
at most 128 tokens that is fixed when a request reaches the worker and changes what all other
requests of the batch get. Rows therefore ask for no log-probabilities. Their candidates come from
the logits before sampling, and afterwards take the rows' places in the sampler's output.
Constrained rows have nodes of the trie where other requests have tokens, and the best valid token
as the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from vllm_trie.beam.top_k import best_of_rows, select_best
from vllm_trie.items import ItemsError, ItemTrie, open_items
from vllm_trie.items.selection import view
from vllm_trie.items.step import (
    Continuations,
    RowCandidates,
    best_continuations,
    by_row,
    tokens_of,
)
from vllm_trie.vllm_hooks.scheduler.items.catalogues import ItemStep
from vllm_trie.vllm_hooks.scheduler.row_steps import REUSED_ROWS, ROW_STEPS, SelectionStep
from vllm_trie.vllm_hooks.worker.beam.decoded_items import DecodedItems
from vllm_trie.vllm_hooks.worker.beam.reused_rows import change_rows
from vllm_trie.vllm_hooks.worker.beam.shared_prompt import share_prompts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

_STATE = "_vllm_trie_items"
"""Attribute of a model runner with its :class:`_WorkerItems`."""
_MAX_VERSIONS = 4
"""Versions of a catalogue that stay mapped."""


class GroupCandidates(NamedTuple):
    """Candidates of a group's rows.

    Attributes:
        places: Places of the rows in the batch.
        candidates: Their candidates.
        tokens: int32[rows], the best valid token of each row; None: those that were sampled.
    """

    places: list[int]
    candidates: RowCandidates
    tokens: np.ndarray | None


class _WorkerItems:
    """Mapped catalogues of a worker, and what it was told of the rows of its present step."""

    def __init__(self) -> None:
        self.steps: list[ItemStep | SelectionStep] = []
        self.decoded = DecodedItems(self.trie)
        self._tries: dict[tuple[str, str], ItemTrie] = {}

    def candidates(
        self, step: ItemStep | SelectionStep, place_of: dict[str, int], logits: torch.Tensor
    ) -> GroupCandidates | None:
        """Return the candidates of one group; None if it fails, which the scheduler sees."""
        try:
            places = [place_of[row_id] for row_id in step.row_ids]
            if isinstance(step, SelectionStep):
                return _selected(step, places, logits[places])
            return self._constrained(step, places, logits[places])
        except Exception as error:
            is_foreseen = isinstance(error, ItemsError)
            logger.error("A beam search fails: %s", error, exc_info=not is_foreseen)
            return None

    def _constrained(
        self, step: ItemStep, places: list[int], logits: torch.Tensor
    ) -> GroupCandidates:
        trie = view(self.trie(step.path, step.version), step.selection)
        eos = step.eos_token_id
        found = best_continuations(
            trie,
            logits,
            step.nodes,
            step.totals,
            step.beam_width,
            eos,
            step.normalize,
            step.weight_factor,
        )
        rows = by_row(found, len(places))
        tokens = tokens_of(trie, rows.targets[:, 0], eos)
        return GroupCandidates(places, rows, np.maximum(tokens, 0))

    def trie(self, path: str, version: str) -> ItemTrie:
        """Return a version of a catalogue.

        Raises:
            ItemsError: The file is gone, or another version.
        """
        key = (path, version)
        if key not in self._tries:
            self._tries[key] = open_items(Path(path), version=version)
            versions = [known for known in self._tries if known[0] == path]
            for old in versions[:-_MAX_VERSIONS]:
                del self._tries[old]
        return self._tries[key]


def _selected(step: SelectionStep, places: list[int], logits: torch.Tensor) -> GroupCandidates:
    rules = step.rules
    if step.totals is None:
        assert rules is not None
        rows = RowCandidates(*best_of_rows(logits, step.num_candidates, rules))
    else:
        found = select_best(logits, step.totals, step.num_candidates, rules)
        rows = by_row(Continuations(*found), len(places))
    # The sampler does not know the rules, and a row that has its best token already moves less.
    return GroupCandidates(places, rows, None if rules is None else rows.targets[:, 0])


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what the scheduler says of rows until the step is sampled."""

    @functools.wraps(original)
    def execute_model(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        for reused in getattr(scheduler_output, REUSED_ROWS, ()):
            change_rows(self.requests, self.input_batch, reused)
        steps = getattr(scheduler_output, ROW_STEPS, None)
        if steps is not None or _STATE in self.__dict__:
            state = self.__dict__.setdefault(_STATE, _WorkerItems())
            state.steps = steps or []
            state.decoded.update(scheduler_output, self.input_batch)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def wrap_build_attention_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the rows of searches share the attention to their prompts."""

    @functools.wraps(original)
    def _build_attention_metadata(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        built = original(self, *args, **kwargs)
        state: _WorkerItems | None = self.__dict__.get(_STATE)
        if state is not None and kwargs.get("num_scheduled_tokens"):  # no dummy run
            share_prompts(built, state.steps, self.input_batch, kwargs["max_query_len"])
        return built

    return _build_attention_metadata


def wrap_sample(original: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
    """Put the candidates of rows into the sampler's output."""

    @functools.wraps(original)
    def _sample(
        self: GPUModelRunner, logits: torch.Tensor, spec_decode_metadata: Any
    ) -> SamplerOutput:
        state: _WorkerItems | None = self.__dict__.get(_STATE)
        if state is None:
            return original(self, logits, spec_decode_metadata)
        state.decoded.mask(logits, self.input_batch)
        if not state.steps:
            return original(self, logits, spec_decode_metadata)
        steps, state.steps = state.steps, []
        # Before the sampler, which may change logits in place.
        place_of = self.input_batch.req_id_to_index
        every = [state.candidates(step, place_of, logits) for step in steps]
        output = original(self, logits, spec_decode_metadata)
        return with_candidates(output, [found for found in every if found is not None])

    return _sample


def with_candidates(output: SamplerOutput, groups: list[GroupCandidates]) -> SamplerOutput:
    """Return the sampler's output with the candidates of rows.

    Args:
        output: Of the whole batch. Its sampled tokens are changed in place.
        groups: Candidates of rows.
    """
    sampled = output.sampled_token_ids
    given = output.logprobs_tensors
    most = max((group.candidates.targets.shape[1] for group in groups), default=0)
    own = 0 if given is None else given.logprobs.shape[1]
    shape = (len(sampled), max(1 + most, own))
    token_ids = torch.zeros(shape, dtype=torch.int32, device=sampled.device)
    logprobs = torch.full(shape, -torch.inf, dtype=torch.float32, device=sampled.device)
    ranks = torch.zeros(len(sampled), dtype=torch.int64, device=sampled.device)
    if given is not None:
        token_ids[:, :own] = given.logprob_token_ids
        logprobs[:, :own] = given.logprobs
        ranks = given.selected_token_ranks
    for group in groups:
        targets, values = map(torch.from_numpy, group.candidates)
        places = torch.tensor(group.places, device=sampled.device)
        if group.tokens is not None:
            sampled[places, 0] = torch.from_numpy(group.tokens).to(sampled)
        logprobs[places] = -torch.inf
        token_ids[places] = 0  # the scheduler looks at all columns, also those of other requests
        token_ids[places, 1 : 1 + targets.shape[1]] = targets.to(sampled.device)
        logprobs[places, 1 : 1 + targets.shape[1]] = values.to(sampled.device)
    output.logprobs_tensors = LogprobsTensors(token_ids, logprobs, ranks)
    return output
