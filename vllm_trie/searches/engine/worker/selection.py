"""Candidates of beams in the worker.

vLLM's sampler returns the best tokens of each row over the whole vocabulary. A search without rules
of its own needs few of them. After a bias or a mask, none may be among them, and it cannot be told
which tokens to choose from: `allowed_token_ids` concerns sampling, not log-probabilities, and
`logprob_token_ids` is a list of at most 128 tokens that is fixed when a request reaches the worker
and changes what all other requests of the batch get. The candidates therefore come from the logits
before sampling and travel in an attribute of their own, which no other request's output can change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_trie.attention.device_copy import to_device
from vllm_trie.refusal import RefusedError
from vllm_trie.searches.engine.constraint import Selection, StepCandidates, WorkerParts
from vllm_trie.searches.engine.search_wire import CANDIDATES
from vllm_trie.searches.unfetched import Unfetched

logger = init_logger(f"vllm.{__name__}")

_Result = TypeVar("_Result")


class Selector:
    """The selections of a worker's present step.

    Args:
        waits: Whether the runner may wait for the device.

    Attributes:
        parts: What selections use and leave.
        selections: What the scheduler asks for; empty once it is selected.
        selected: The candidates of the step by proxy id, without those of selections that failed.
            Those that were launched together are together.
    """

    def __init__(self, waits: bool) -> None:
        self.parts = WorkerParts(waits)
        self.selections: list[Selection] = []
        self.selected: list[Unfetched[dict[str, StepCandidates]]] = []

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
        selections, self.selections, self.selected = self.selections, [], []
        num_requests = 0
        batches: dict[Hashable, list[tuple[Selection, np.ndarray]]] = {}
        for selection in selections:
            rows = rows_of_beams.get(selection.proxy_id)
            if rows is None:
                num_requests += 1
                rows = np.array([row_of[selection.proxy_id]])
            key = type(selection), selection.kind(len(rows))
            batches.setdefault(key, []).append((selection, rows))
        for batch in batches.values():
            try:
                self.selected.append(self._launch(batch, logits))
            except Exception:  # of one of them; each alone, that one is seen
                for part in batch:
                    launched = _unless_it_fails(functools.partial(self._launch, [part], logits))
                    self.selected += [] if launched is None else [launched]
        return num_requests

    def _launch(
        self, batch: Sequence[tuple[Selection, np.ndarray]], logits: torch.Tensor
    ) -> Unfetched[dict[str, StepCandidates]]:
        """Start selections of one kind, with the int64 [beams] rows of each group's logits."""
        selections = [selection for selection, _ in batch]
        rows = np.concatenate([rows for _, rows in batch])
        first, count = int(rows[0]), len(rows)
        if np.array_equal(rows, np.arange(first, first + count)):
            logits = logits[first : first + count]
        else:
            logits = logits[to_device(rows, logits.device)]
        launched = selections[0].launch(selections, logits, self.parts)
        names = [selection.proxy_id for selection in selections]
        return launched.then(lambda candidates: dict(zip(names, candidates, strict=True)))


def send(selected: Sequence[Unfetched[dict[str, StepCandidates]]], output: object) -> None:
    """Attach candidates to the output of their step; waits for the device."""
    candidates: dict[str, StepCandidates] = {}
    for unfetched in selected:
        candidates |= _unless_it_fails(unfetched.fetch) or {}
    setattr(output, CANDIDATES, candidates)


def _unless_it_fails(work: Callable[[], _Result]) -> _Result | None:
    """Return what work for a search returns, None if it fails; the scheduler sees that."""
    try:
        return work()
    except Exception as error:
        is_foreseen = isinstance(error, RefusedError)
        logger.error("A beam search fails: %s", error, exc_info=not is_foreseen)
        return None
