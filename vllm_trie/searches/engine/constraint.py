"""Searches whose candidates are not tokens alone: what an extra brings for them.

::

    front end   SearchConstraint          the options of a request, checked
    scheduler   start -> GroupSearch      the search, and what passes between it and the worker
    worker      Selection.launch          candidates of a step

A search of tokens has a :class:`GroupSearch` and a :class:`Selection` of the core.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict

from vllm_trie.extras import loaded
from vllm_trie.searches import BeamOptions, BeamSearch, Children, Hypothesis, SearchSettings
from vllm_trie.searches.device_beams import DeviceBeams

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

    from vllm_trie.searches.unfetched import Unfetched

StepCandidates = Any
"""A named tuple of arrays, of which the first, ``rows``, are rows of the search."""


class SearchConstraint(BaseModel):
    """Options of a request, next to ``beam_width``, that decide what its search may generate.

    The first field asks for the constraint; it is None where it was left out.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @abstractmethod
    def check(self, vllm_config: VllmConfig, params: SamplingParams, options: BeamOptions) -> None:
        """Refuse a request, as the user gave it, that cannot be served.

        Raises:
            BeamRequestError: Why.
        """

    @abstractmethod
    def check_processed(
        self, vllm_config: VllmConfig, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        """Refuse a request that the engine cannot serve with this prompt.

        Raises:
            BeamRequestError: Why.
        """

    @abstractmethod
    def stop_token_ids(self, params: SamplingParams) -> list[int | None]:
        """Return the tokens that end a hypothesis; None for one that the model does not have."""

    @classmethod
    @abstractmethod
    def open(cls, vllm_config: VllmConfig) -> Any:
        """Return what all searches of a scheduler share."""

    @abstractmethod
    def start(self, shared: Any, params: SamplingParams, settings: SearchSettings) -> GroupSearch:
        """Return the search of a request.

        Args:
            shared: What :meth:`open` returned.
            params: Of the request.
            settings: Those of a search of tokens.
        """


class GroupSearch(ABC):
    """The search of a group in the scheduler, and what passes between it and the worker.

    Attributes:
        search: The search over tokens.
        is_plain: Whether tokens and their probabilities alone decide what the search does.
    """

    search: BeamSearch
    is_plain: bool = False

    @abstractmethod
    def selection(self, proxy_id: str, rows: np.ndarray) -> Selection:
        """Return what the worker needs to select the candidates of int64 [beams] of the search."""

    @abstractmethod
    def advance(self, candidates: StepCandidates) -> Children:
        """Take a step with the candidates of all beams; return its next beams.

        Raises:
            RuntimeError: No beam has a possible candidate.
        """

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best hypotheses of a search that is done, best first."""
        return self.search.hypotheses()

    @abstractmethod
    def described(self, hypothesis: Hypothesis) -> tuple[int | str | None, dict[str, Any]]:
        """Return a hypothesis' stop reason, and its own part of ``CompletionOutput.beam``."""


@dataclass
class WorkerParts:
    """The worker's objects that selections use.

    Attributes:
        waits: Whether the runner may wait for the device.
        kept: What selections leave for later ones, by keys of their own.
        beams: By proxy id the beams of groups whose children the device chooses.
    """

    waits: bool
    kept: dict[Any, Any] = field(default_factory=dict)
    beams: DeviceBeams = field(default_factory=dict)


class Selection(Protocol):
    """The rules by which a worker selects a group's candidates. The scheduler pickles it."""

    @property
    def proxy_id(self) -> str:
        """The request that stands for the group."""

    def kind(self, num_beams: int) -> Hashable:
        """Return what groups have in common whose selections are launched together.

        Args:
            num_beams: Of the group in this step.
        """

    @staticmethod
    def launch(
        selections: Sequence[Any], logits: torch.Tensor, worker: WorkerParts
    ) -> Unfetched[list[StepCandidates]]:
        """Start selections of one kind from float [beams, vocab], the rows of one group behind
        those of another."""


@functools.cache
def constraints() -> Mapping[str, type[SearchConstraint]]:
    """Return the constraints that extras bring, by the option that asks for each."""
    return {next(iter(kind.model_fields)): kind for kind in loaded("constraint")}


@functools.cache
def option_names() -> Mapping[str, str]:
    """Return the keys of ``extra_args`` that belong to searches, and the option each of them
    needs."""
    needed = dict.fromkeys(BeamOptions.model_fields, "beam_width")
    for leader, kind in constraints().items():
        needed |= dict.fromkeys(kind.model_fields, leader)
    return needed
