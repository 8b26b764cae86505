"""Candidates of beams in the worker: out of all beams of a search, or from their catalogues.

vLLM's sampler returns the best tokens of each row over the whole vocabulary. A search without rules
of its own needs few of them. After a bias or a mask, and of the 2,000 valid children in a
catalogue, none may be among them, and it cannot be told which tokens to choose from:
`allowed_token_ids` concerns sampling, not log-probabilities, and `logprob_token_ids` is a list of
at most 128 tokens that is fixed when a request reaches the worker and changes what all other
requests of the batch get. The candidates therefore come from the logits before sampling and travel
in an attribute of their own, which no other request's output can change: tokens, or nodes of the
trie of a catalogue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_trie.attention.device_copy import to_device
from vllm_trie.extras.items import ItemsError, ItemTrie, open_items
from vllm_trie.extras.items.selection import view
from vllm_trie.extras.items.step import best_continuations
from vllm_trie.searches.device_beams import DeviceBeams
from vllm_trie.searches.device_step import launch_best
from vllm_trie.searches.engine.search_wire import (
    CANDIDATES,
    ItemSelection,
    StepCandidates,
    TokenSelection,
)
from vllm_trie.searches.top_k import best_of_rows, launch_draws, select_best
from vllm_trie.searches.unfetched import Unfetched

logger = init_logger(__name__)

_Result = TypeVar("_Result")
_MAX_VERSIONS = 4
"""Versions of a catalogue that stay open."""


class Selector:
    """Mapped catalogues of a worker, and the selections of its present step.

    Args:
        waits: Whether the runner may wait for the device.

    Attributes:
        selections: What the scheduler asks for; empty once it is selected.
        selected: The candidates of each selection of the step; None for one that failed.
    """

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self.selections: list[ItemSelection | TokenSelection] = []
        self.selected: list[Unfetched[StepCandidates] | None] = []
        self._tries: dict[tuple[str, str], ItemTrie] = {}

    def select(
        self,
        row_of: Mapping[str, int],
        logits: torch.Tensor,
        rows_of_beams: Mapping[str, np.ndarray],
        on_device: Mapping[str, DeviceBeams] | None = None,
    ) -> int:
        """Select the candidates of the step; return how many requests they are of.

        Args:
            row_of: Id of a request to the row of its last token's logits.
            logits: float [logits rows, vocab], before sampling.
            rows_of_beams: Id of a group's proxy to the rows of its beams, which are no requests. A
                group that is not there has one beam, its proxy.
            on_device: Proxy id to the beams of groups whose children the device may choose.
        """
        selections, self.selections, self.selected = self.selections, [], []
        num_requests = 0
        for selection in selections:
            rows = rows_of_beams.get(selection.proxy_id)
            if rows is None:
                num_requests += 1
                rows = np.array([row_of[selection.proxy_id]])
            launch = functools.partial(self._launch, selection, rows, logits, on_device or {})
            self.selected.append(_unless_it_fails(launch))
        return num_requests

    def _launch(
        self,
        selection: ItemSelection | TokenSelection,
        rows: np.ndarray,
        logits: torch.Tensor,
        on_device: Mapping[str, DeviceBeams],
    ) -> Unfetched[StepCandidates]:
        """Start the selection of one group's candidates.

        Args:
            selection: Of the group.
            rows: int64 [beams], the beams' rows of logits.
            logits: float [logits rows, vocab].
            on_device: As for :meth:`select`.
        """
        first, count = int(rows[0]), len(rows)
        if np.array_equal(rows, np.arange(first, first + count)):
            logits = logits[first : first + count]
        else:
            logits = logits[to_device(rows, logits.device)]
        if isinstance(selection, ItemSelection):
            return best_continuations(
                view(
                    self.trie(selection.path, selection.memory, selection.version),
                    selection.selection,
                ),
                logits,
                selection.nodes,
                selection.totals,
                selection.beam_width,
                selection.eos_token_id,
                selection.normalize,
                selection.weight_factor,
            )
        totals, count, rules = selection.totals, selection.num_candidates, selection.rules
        if (stops := selection.stop_token_ids) is not None:
            return on_device[selection.proxy_id].launch(logits, totals, count, stops)
        if totals is None:
            return best_of_rows(logits, count, rules)
        if selection.draws is not None:
            return launch_draws(logits, totals, count, rules, selection.draws)
        if not self._waits:
            return launch_best(logits, totals, count, rules)
        candidates = select_best(logits.cpu(), totals, count, rules)
        return Unfetched((), lambda: candidates)

    def trie(self, path: str, memory: str, version: str) -> ItemTrie:
        """Return a version of a catalogue.

        Args:
            path: Its file.
            memory: Where the scheduler has its content; workers of other hosts read the file.
            version: Its digest.

        Raises:
            ItemsError: The file is gone, or another version.
        """
        key = (path, version)
        if key not in self._tries:
            try:
                self._tries[key] = open_items(Path(memory), version=version)
            except ItemsError:
                self._tries[key] = open_items(Path(path), version=version)
            versions = [opened for opened in self._tries if opened[0] == path]
            for old in versions[:-_MAX_VERSIONS]:
                del self._tries[old]
        return self._tries[key]


def send(selected: Sequence[Unfetched[StepCandidates] | None], output: object) -> None:
    """Attach candidates to the output of their step; waits for the device."""
    candidates = [unfetched and _unless_it_fails(unfetched.fetch) for unfetched in selected]
    setattr(output, CANDIDATES, candidates)


def _unless_it_fails(work: Callable[[], _Result]) -> _Result | None:
    """Return what work for one search returns, None if it fails; the scheduler sees that."""
    try:
        return work()
    except Exception as error:
        is_foreseen = isinstance(error, ItemsError)
        logger.error("A beam search fails: %s", error, exc_info=not is_foreseen)
        return None
