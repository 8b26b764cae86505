"""Candidates of beams in the worker: out of all beams of a search, or from their catalogues.

vLLM's sampler returns the best tokens of each row over the whole vocabulary. A search without rules
of its own needs few of them. After a bias or a mask, and of the 2,000 valid children in a
catalogue, none may be among them, and it cannot be told which tokens to choose from:
`allowed_token_ids` concerns sampling, not log-probabilities, and `logprob_token_ids` is a list of
at most 128 tokens that is fixed when a request reaches the worker and changes what all other
requests of the batch get. The candidates therefore come from the logits before sampling and travel
in an attribute of their own, which no other request's output can change: tokens, or nodes of the
trie of a catalogue. A step of beams only needs no sampler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.outputs import SamplerOutput

from vllm_trie.beam.top_k import best_of_rows, select_best
from vllm_trie.items import ItemsError, ItemTrie, open_items
from vllm_trie.items.selection import view
from vllm_trie.items.step import Trie, best_continuations
from vllm_trie.vllm_hooks.beam_wire import (
    CANDIDATES,
    SELECTIONS,
    ItemSelection,
    StepCandidates,
    TokenSelection,
)
from vllm_trie.vllm_hooks.worker.beam.beams_v1 import (
    attached_to,
    with_own_counts,
    without_beams,
)
from vllm_trie.vllm_hooks.worker.beam.item_masks import DecodedItems
from vllm_trie.vllm_hooks.worker.beam.shared_prompt import share_prompts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

STATE = "_vllm_trie_selector"
"""Attribute of a model runner with its :class:`Selector`."""
_MAX_VERSIONS = 4
"""Versions of a catalogue that stay mapped."""


class Selector:
    """Mapped catalogues of a worker, and the selections of its present step.

    Attributes:
        selections: What the scheduler asks for; empty once it is selected.
        decoded: Requests that decode an item.
    """

    def __init__(self) -> None:
        self.selections: list[ItemSelection | TokenSelection] = []
        self._candidates: list[StepCandidates | None] = []  # of each of them
        self.decoded = DecodedItems(self.trie)
        self._tries: dict[tuple[str, str], ItemTrie] = {}

    def select(
        self,
        row_of: Mapping[str, int],
        logits: torch.Tensor,
        rows_of_beams: Mapping[str, np.ndarray],
    ) -> int:
        """Select the candidates of the step; return how many requests they are of.

        Args:
            row_of: Id of a request to the row of its last token's logits.
            logits: float [logits rows, vocab], before sampling.
            rows_of_beams: Id of a group's proxy to the rows of its beams, which are no requests. A
                group that is not there has one beam, its proxy.
        """
        selections, self.selections, self._candidates = self.selections, [], []
        num_requests = 0
        for selection in selections:
            candidates = None
            rows = rows_of_beams.get(selection.proxy_id)
            try:
                if rows is None:
                    rows = np.array([row_of[selection.proxy_id]])
                    num_requests += 1
                candidates = self._candidates_of(selection, rows, logits)
            except Exception as error:  # the search fails, and the scheduler sees it
                is_foreseen = isinstance(error, ItemsError)
                logger.error("A beam search fails: %s", error, exc_info=not is_foreseen)
            self._candidates.append(candidates)
        return num_requests

    def send(self, output: Any) -> None:
        """Attach the candidates to the output of the step."""
        if self._candidates:
            setattr(output, CANDIDATES, self._candidates)
            self._candidates = []

    def _candidates_of(
        self, selection: ItemSelection | TokenSelection, rows: np.ndarray, logits: torch.Tensor
    ) -> StepCandidates:
        """Return the candidates of one group.

        Args:
            selection: Of the group.
            rows: int64 [beams], the beams' rows of logits.
            logits: float [logits rows, vocab].
        """
        first = int(rows.min())
        if (
            isinstance(selection, TokenSelection)
            and selection.totals is not None
            and selection.rules is None
            and int(rows.max()) - first + 1 == len(rows)  # neighbours, in any order
        ):
            logits, order = logits[first : first + len(rows)], np.argsort(rows)
            count = selection.num_candidates
            return select_best(logits, selection.totals, count, rows_of_logits=order)
        logits = logits[torch.from_numpy(rows).to(logits.device)]
        if isinstance(selection, TokenSelection):
            count, rules = selection.num_candidates, selection.rules
            if selection.totals is None:
                return best_of_rows(logits, count, rules)
            return select_best(logits, selection.totals, count, rules)
        return best_continuations(
            self._trie_of(selection),
            logits,
            selection.nodes,
            selection.totals,
            selection.beam_width,
            selection.eos_token_id,
            selection.normalize,
            selection.weight_factor,
        )

    def _trie_of(self, selection: ItemSelection) -> Trie:
        return view(self.trie(selection.path, selection.version), selection.selection)

    def trie(self, path: str, version: str) -> ItemTrie:
        """Return a version of a catalogue.

        Raises:
            ItemsError: The file is gone, or another version.
        """
        key = (path, version)
        if key not in self._tries:
            self._tries[key] = open_items(Path(path), version=version)
            versions = [opened for opened in self._tries if opened[0] == path]
            for old in versions[:-_MAX_VERSIONS]:
                del self._tries[old]
        return self._tries[key]


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what the scheduler asks for until the step is sampled."""

    @functools.wraps(original)
    def execute_model(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        selections = getattr(scheduler_output, SELECTIONS, None)
        if selections is not None or STATE in self.__dict__:
            state = self.__dict__.setdefault(STATE, Selector())
            state.selections = selections or []
            state.decoded.update(scheduler_output, self.input_batch)
        return original(self, with_own_counts(scheduler_output), *args, **kwargs)

    return execute_model


def wrap_build_attention_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the beams of searches share the attention to their prompts."""

    @functools.wraps(original)
    def _build_attention_metadata(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        built = original(self, *args, **kwargs)
        beams = attached_to(self)
        if beams is not None and beams.num_beams == self.input_batch.num_reqs:
            share_prompts(built, beams)
        return built

    return _build_attention_metadata


def wrap_sample(original: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
    """Select candidates next to the sampler, which sees requests only."""

    @functools.wraps(original)
    def _sample(
        self: GPUModelRunner, logits: torch.Tensor, spec_decode_metadata: Any
    ) -> SamplerOutput:
        state: Selector | None = self.__dict__.get(STATE)
        beams = attached_to(self)
        if state is not None:
            state.decoded.mask(logits, self.input_batch)
        num_selected = 0
        if state is not None and state.selections:
            # Before the sampler, which may change logits in place.
            row_of, rows_of_beams = self.input_batch.req_id_to_index, {}
            if spec_decode_metadata is not None:  # a request has a row for each of its drafts, too
                rows = np.cumsum([0, *(1 + n for n in spec_decode_metadata.num_draft_tokens)])
                row_of = dict(zip(self.input_batch.req_ids, rows.tolist(), strict=False))
            if beams is not None:
                further = len(logits) - self.input_batch.num_reqs
                rows_of_beams = {name: rows + further for name, rows in beams.places.items()}
            num_selected = state.select(row_of, logits, rows_of_beams)
        if beams is not None:
            logits, spec_decode_metadata = without_beams(beams, logits, spec_decode_metadata)
            beams.detach()
        needs_sampler = num_selected < len(logits) or self.speculative_config is not None
        if len(logits) and needs_sampler:
            return original(self, logits, spec_decode_metadata)
        # Nobody else's tokens to sample.
        tokens = torch.zeros((len(logits), 1), dtype=torch.int32, device=logits.device)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    return _sample


def wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send the candidates with the output of the step."""

    @functools.wraps(original)
    def sample_tokens(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        state: Selector | None = self.__dict__.get(STATE)
        if state is not None:
            # Under asynchronous scheduling, inside the output that is still to be copied.
            state.send(getattr(output, "_model_runner_output", output))
        return output

    return sample_tokens
