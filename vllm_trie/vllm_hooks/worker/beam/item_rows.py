"""Candidates of rows in the worker: out of all rows of a search, or from their catalogues.

vLLM's sampler returns the best tokens of each row over the whole vocabulary. A search without rules
of its own needs few of them. After a bias or a mask, and of the 2,000 valid children in a
catalogue, none may be among them, and it cannot be told which tokens to choose from:
`allowed_token_ids` concerns sampling, not log-probabilities, and `logprob_token_ids` is a list of
at most 128 tokens that is fixed when a request reaches the worker and changes what all other
requests of the batch get. Rows therefore ask for no log-probabilities. Their candidates come from
the logits before sampling and travel in an attribute of their own, which no other request's output
can change: tokens, or nodes of the trie for constrained rows. The sample of a row is its best
candidate. A step of rows only needs no sampler.
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
from vllm_trie.items.step import Trie, best_continuations, tokens_of
from vllm_trie.vllm_hooks.scheduler.items.catalogues import ItemStep
from vllm_trie.vllm_hooks.scheduler.row_steps import (
    CANDIDATES,
    REUSED_ROWS,
    ROW_STEPS,
    SelectionStep,
    StepCandidates,
)
from vllm_trie.vllm_hooks.worker.beam.decoded_items import DecodedItems
from vllm_trie.vllm_hooks.worker.beam.reused_rows import change_rows
from vllm_trie.vllm_hooks.worker.beam.shared_prompt import share_prompts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

STATE = "_vllm_trie_items"
"""Attribute of a model runner with its :class:`WorkerRows`."""
_MAX_VERSIONS = 4
"""Versions of a catalogue that stay mapped."""


class WorkerRows:
    """Mapped catalogues of a worker, and the rows of its present step.

    Attributes:
        steps: What the scheduler says of them; empty once they are selected.
        decoded: Requests that decode an item.
    """

    def __init__(self) -> None:
        self.steps: list[ItemStep | SelectionStep] = []
        self._found: list[StepCandidates | None] = []  # of each of the steps
        self._best: list[tuple[np.ndarray, np.ndarray]] = []
        self.decoded = DecodedItems(self.trie)
        self._tries: dict[tuple[str, str], ItemTrie] = {}

    def select(self, place_of: Mapping[str, int], logits: torch.Tensor) -> int:
        """Select the candidates of the step's rows; return the number of rows.

        Args:
            place_of: Id to place of the requests of the batch.
            logits: float [requests of the batch, vocab], before sampling.
        """
        steps, self.steps, self._found, self._best = self.steps, [], [], []
        for step in steps:
            candidates = None
            try:
                places = np.array([place_of[row_id] for row_id in step.row_ids])
                candidates = self._candidates(step, places, logits)
                rows, tokens = self._best_tokens(step, candidates)
                self._best.append((places[rows], tokens))
            except Exception as error:  # the search fails, and the scheduler sees it
                is_foreseen = isinstance(error, ItemsError)
                logger.error("A beam search fails: %s", error, exc_info=not is_foreseen)
            self._found.append(candidates)
        return sum(len(step.row_ids) for step in steps)

    def put_best_tokens(self, sampled: torch.Tensor) -> None:
        """Make the best candidate of each row its sample, in place.

        It is the likeliest to be the token of its child, which then stays in its place.

        Args:
            sampled: int [requests of the batch, 1].
        """
        for places, tokens in self._best:
            indices = torch.from_numpy(places).to(sampled.device)
            sampled[indices, 0] = torch.from_numpy(tokens).to(sampled)

    def send(self, output: Any) -> None:
        """Attach the candidates to the output of the step."""
        if self._found:
            setattr(output, CANDIDATES, self._found)
            self._found = []

    def _candidates(
        self, step: ItemStep | SelectionStep, places: np.ndarray, logits: torch.Tensor
    ) -> StepCandidates:
        """Return the candidates of one group.

        Args:
            step: The step of the group.
            places: int64 [rows], places of its rows in the batch.
            logits: float [requests of the batch, vocab].
        """
        first = int(places.min())
        if (
            isinstance(step, SelectionStep)
            and step.totals is not None
            and step.rules is None
            and int(places.max()) - first + 1 == len(places)  # neighbours, in any order
        ):
            logits, order = logits[first : first + len(places)], np.argsort(places)
            return select_best(logits, step.totals, step.num_candidates, rows_of_logits=order)
        logits = logits[torch.from_numpy(places).to(logits.device)]
        if isinstance(step, SelectionStep):
            if step.totals is None:
                return best_of_rows(logits, step.num_candidates, step.rules)
            return select_best(logits, step.totals, step.num_candidates, step.rules)
        return best_continuations(
            self._trie_of(step),
            logits,
            step.nodes,
            step.totals,
            step.beam_width,
            step.eos_token_id,
            step.normalize,
            step.weight_factor,
        )

    def _best_tokens(
        self, step: ItemStep | SelectionStep, candidates: StepCandidates
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that have candidates, and the best token of each."""
        first = np.flatnonzero(np.diff(candidates.rows, prepend=-1))
        best = candidates[1][first]
        if isinstance(step, ItemStep):
            best = tokens_of(self._trie_of(step), best, step.eos_token_id)
        return candidates.rows[first], best

    def _trie_of(self, step: ItemStep) -> Trie:
        return view(self.trie(step.path, step.version), step.selection)

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


def wrap_execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what the scheduler says of rows until the step is sampled."""

    @functools.wraps(original)
    def execute_model(
        self: GPUModelRunner, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        for reused in getattr(scheduler_output, REUSED_ROWS, ()):
            change_rows(self.requests, self.input_batch, reused)
        steps = getattr(scheduler_output, ROW_STEPS, None)
        if steps is not None or STATE in self.__dict__:
            state = self.__dict__.setdefault(STATE, WorkerRows())
            state.steps = steps or []
            state.decoded.update(scheduler_output, self.input_batch)
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def wrap_build_attention_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the rows of searches share the attention to their prompts."""

    @functools.wraps(original)
    def _build_attention_metadata(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        built = original(self, *args, **kwargs)
        state: WorkerRows | None = self.__dict__.get(STATE)
        if state is not None and kwargs.get("num_scheduled_tokens"):  # no dummy run
            share_prompts(built, state.steps, self.input_batch, kwargs["max_query_len"])
        return built

    return _build_attention_metadata


def wrap_sample(original: Callable[..., SamplerOutput]) -> Callable[..., SamplerOutput]:
    """Select the candidates of rows next to the sampler."""

    @functools.wraps(original)
    def _sample(
        self: GPUModelRunner, logits: torch.Tensor, spec_decode_metadata: Any
    ) -> SamplerOutput:
        state: WorkerRows | None = self.__dict__.get(STATE)
        if state is None:
            return original(self, logits, spec_decode_metadata)
        state.decoded.mask(logits, self.input_batch)
        if not state.steps:
            return original(self, logits, spec_decode_metadata)
        # Before the sampler, which may change logits in place.
        if state.select(self.input_batch.req_id_to_index, logits) < len(logits):
            output = original(self, logits, spec_decode_metadata)
        else:  # nobody else's tokens to sample
            tokens = torch.zeros((len(logits), 1), dtype=torch.int32, device=logits.device)
            output = SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
        state.put_best_tokens(output.sampled_token_ids)
        return output

    return _sample


def wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send the candidates of rows with the output of the step."""

    @functools.wraps(original)
    def sample_tokens(self: GPUModelRunner, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        state: WorkerRows | None = self.__dict__.get(STATE)
        if state is not None:
            # Under asynchronous scheduling, inside the output that is still to be copied.
            state.send(getattr(output, "_model_runner_output", output))
        return output

    return sample_tokens
