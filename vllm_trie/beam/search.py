"""Beam search as a pure algorithm over (parent, token, log-probability).

The search knows neither a model nor a cache. A step takes the best candidates of every row (running
hypothesis) and returns the rows of the next step, each as a child of an old row. Hypotheses are
paths in a trie of nodes; a row is a node that is still extended.

The semantics are those of Hugging Face's ``generate(num_beams=b)``; tests compare the results for
equality. :mod:`vllm_trie.beam.reference` is the same search, written to be read.

References: "Efficient Beam Search for Large Language Models Using Trie-Based Decoding" for the
trie; Vijayakumar et al., "Diverse Beam Search", for ``num_beam_groups``; Kool et al., "Stochastic
Beams and Where to Find Them", for the sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.beam.candidates import CandidateRules, Outcomes
from vllm_trie.beam.finished import FinishedNode, FinishedSet
from vllm_trie.beam.settings import SearchSettings
from vllm_trie.beam.trace import NodeFate, SearchTrace

StopStringFinder = Callable[[list[int]], str | None]
"""Returns the stop string that the last of a hypothesis' generated tokens completes, if any."""


class Child(NamedTuple):
    """A row of the next step: row `parent` of this step, extended by `token_id`.

    `position` is the token's place among the candidates of the parent.
    """

    parent: int
    token_id: int
    position: int


class Hypothesis(NamedTuple):
    """A finished hypothesis.

    Attributes:
        token_ids: Generated tokens, stop token included.
        logprobs: Raw log-probability of each of them.
        score: Sum of the (rule-adjusted) log-probabilities over ``length ** length_penalty``.
        sum_logprob: That sum.
        reason: ``"stop"`` or ``"length"``.
        stop: Stop token id or stop string that ended it, None if something else did.
        places: For each token (step, row, position among the row's candidates).
    """

    token_ids: list[int]
    logprobs: list[float]
    score: float
    sum_logprob: float
    reason: str
    stop: int | str | None
    places: list[tuple[int, int, int]]


class _Node(NamedTuple):
    parent: int
    token_id: int
    logprob: float
    total: float
    place: tuple[int, int, int]
    fate: NodeFate


class _Candidate(NamedTuple):
    total: float  # a float32 value
    row: int
    position: int
    token_id: int
    logprob: float


class _Fate(NamedTuple):
    """What becomes of a candidate; one that is complete may also go on."""

    ends: bool
    goes_on: bool
    reason: str = ""
    stop: int | str | None = None


class BeamSearch:
    """One search: call :meth:`advance` until ``done``, then :meth:`hypotheses`.

    Attributes:
        settings: The settings of the search.
        steps: Steps taken.
        done: Whether the search is over.
        trace: The whole trie, if the settings ask for it and :meth:`hypotheses` was called.
    """

    def __init__(
        self,
        settings: SearchSettings,
        prompt_token_ids: Sequence[int] = (),
        find_stop_string: StopStringFinder | None = None,
    ) -> None:
        self.settings = settings
        self.steps = 0
        self.done = False
        self.trace: SearchTrace | None = None
        self._rules = CandidateRules(settings, prompt_token_ids)
        self._find_stop_string = find_stop_string
        self._stop_token_ids = frozenset(settings.stop_token_ids)
        self._random = np.random.default_rng(settings.seed) if settings.do_sample else None
        self._nodes: list[_Node] = []
        # Every diverse group starts at the one row of the prompt.
        self._groups = [_DiverseGroup(settings) for _ in range(settings.num_beam_groups)]
        self._row_nodes: list[int] = [-1]

    @property
    def num_rows(self) -> int:
        """The number of rows whose candidates :meth:`advance` expects."""
        return len(self._row_nodes)

    @property
    def totals(self) -> np.ndarray:
        """Cumulative log-probabilities float32[num_rows] of a search without diverse groups."""
        return self._groups[0].totals

    @property
    def takes_best_of_all(self) -> bool:
        """Whether a step needs only the best ``num_candidates`` continuations of all rows together.

        Rules, sampling and diverse groups need the best of every row.
        """
        return not self._rules.active and len(self._groups) == 1

    def generated(self, row: int) -> list[int]:
        """Return the generated tokens of a row."""
        return [node.token_id for node in self._path(self._row_nodes[row])]

    def advance(
        self, token_ids: np.ndarray, logprobs: np.ndarray, outcomes: Outcomes | None = None
    ) -> list[Child]:
        """Take one step.

        Args:
            token_ids: int[rows, k], candidates of each row, distinct within a row.
            logprobs: float32[rows, k], their log-probabilities; with the bias, which is added
                here, best first.
            outcomes: What the candidates lead to; None if stop tokens and the length decide. A
                hypothesis that is not complete at the greatest length is dropped.

        Returns:
            The rows of the next step, empty when the search is done. Mutates the search.

        Raises:
            ValueError: The search is done, or the arrays are not of shape ``[num_rows, k]``.
        """
        if self.done:
            raise ValueError("the search is done; start a new one")
        if token_ids.shape != logprobs.shape or token_ids.shape[0] != self.num_rows:
            raise ValueError(
                f"token_ids and logprobs must be of shape [{self.num_rows}, k], got "
                f"{token_ids.shape} and {logprobs.shape}"
            )
        adjusted = self._adjust(token_ids, logprobs)
        children: list[Child] = []
        nodes: list[int] = []
        taken: list[int] = []
        for group in self._groups:
            if group.done:
                continue
            values = adjusted
            if taken and self.settings.diversity_penalty:
                values = adjusted - self._diversity(token_ids, taken)
            kept = self._advance_group(group, token_ids, values, logprobs, outcomes)
            group.first_row = len(children)
            group.num_rows = len(kept)
            for candidate, node in kept:
                children.append(Child(candidate.row, candidate.token_id, candidate.position))
                nodes.append(node)
                taken.append(candidate.token_id)
        self.steps += 1
        self._row_nodes = nodes
        self.done = not children
        return children

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best ``beam_width`` hypotheses of a search that is done, best first."""
        finished = [hypothesis for group in self._groups for hypothesis in group.finished.best]
        finished.sort(key=lambda hypothesis: -hypothesis.score)
        if self.settings.trace:
            self.trace = SearchTrace(
                token_ids=[node.token_id for node in self._nodes],
                parents=[node.parent for node in self._nodes],
                sums=[node.total for node in self._nodes],
                fates=[str(node.fate) for node in self._nodes],
                returned=[each.node for each in finished],
                scores=[float(each.score) for each in finished],
                steps=self.steps,
                beam_width=self.settings.beam_width,
            )
        return [self._hypothesis(each) for each in finished]

    def _adjust(self, token_ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        logprobs = self._rules.add_bias(token_ids, logprobs)
        if not self._rules.active:
            return logprobs
        return np.stack(
            [
                self._rules.apply(token_ids[row], logprobs[row], self.generated(row))
                for row in range(self.num_rows)
            ]
        )

    def _diversity(self, token_ids: np.ndarray, taken: list[int]) -> np.ndarray:
        tokens, counts = np.unique(taken, return_counts=True)
        place = np.minimum(np.searchsorted(tokens, token_ids), tokens.size - 1)
        occurrences = np.where(tokens[place] == token_ids, counts[place], 0)
        return occurrences.astype(np.float32) * np.float32(self.settings.diversity_penalty)

    def _advance_group(
        self,
        group: _DiverseGroup,
        token_ids: np.ndarray,
        adjusted: np.ndarray,
        raw: np.ndarray,
        outcomes: Outcomes | None,
    ) -> list[tuple[_Candidate, int]]:
        """Take one step of a diverse group; return its running candidates and their nodes."""
        settings = self.settings
        length = self.steps + 1
        candidates = self._best(group, token_ids, adjusted, raw, outcomes)
        looks_at_all = settings.trace or self._random is not None
        running: list[_Candidate] = []
        finished: list[FinishedNode] = []
        for rank, candidate in enumerate(candidates):
            fate = self._fate(candidate, outcomes)
            if fate.goes_on:
                running.append(candidate)
            if fate.ends and rank < settings.group_width:
                score = group.finished.score(candidate.total, length)
                node = self._add(candidate, NodeFate.FINISHED)
                finished.append(FinishedNode(score, node, fate.reason, fate.stop))
            elif settings.trace and not fate.goes_on:
                self._add(candidate, NodeFate.DROPPED)
            if len(running) == settings.group_width and not looks_at_all:
                break
        if finished:
            group.finished.add(finished)
        if self._random is not None:
            running.sort(key=lambda candidate: -candidate.total)
        if settings.trace:
            for candidate in running[settings.group_width :]:
                self._add(candidate, NodeFate.DROPPED)
        del running[settings.group_width :]
        kept = [(candidate, self._add(candidate, NodeFate.KEPT)) for candidate in running]
        group.totals = np.array([candidate.total for candidate in running], dtype=np.float32)
        if not kept or group.finished.closed(running[0].total, length):
            group.done = True
            return []
        return kept

    def _best(
        self,
        group: _DiverseGroup,
        token_ids: np.ndarray,
        adjusted: np.ndarray,
        raw: np.ndarray,
        outcomes: Outcomes | None,
    ) -> Iterator[_Candidate]:
        """Yield the step's candidates: the best, or draws without replacement in their order."""
        first = group.first_row
        totals: np.ndarray = (
            adjusted[first : first + group.num_rows] + group.totals[:, None]
        ).ravel()
        if self._random is None:
            keys = -totals  # infinite if forbidden, NaN from a broken model
        else:
            # The k largest of log-probability + Gumbel noise are k draws without replacement.
            keys = -(totals + self._random.gumbel(size=totals.size))
        if outcomes is None:
            places = _smallest(keys, self.settings.num_candidates)
        else:  # of two equal ones that end and go on, neither may push the other out
            width = self.settings.group_width
            kinds = map(np.flatnonzero, outcomes)
            places = np.union1d(*(kind[_smallest(keys[kind], width)] for kind in kinds))
        # A tie goes to the earlier row, then to the better candidate.
        places = places[np.argsort(keys[places], kind="stable")]
        rows, positions = np.divmod(places, token_ids.shape[1])
        rows += first
        return map(
            _Candidate,
            totals[places].tolist(),
            rows.tolist(),
            positions.tolist(),
            token_ids[rows, positions].tolist(),
            raw[rows, positions].tolist(),
        )

    def _fate(self, candidate: _Candidate, outcomes: Outcomes | None) -> _Fate:
        last = self.steps + 1 == self.settings.max_new_tokens
        if outcomes is not None:
            place = candidate.row, candidate.position
            stop = candidate.token_id if candidate.token_id in self._stop_token_ids else None
            return _Fate(
                bool(outcomes.ends[place]), bool(outcomes.goes_on[place]) and not last, "stop", stop
            )
        found = self._stop_of(candidate)
        if found is not None:
            return _Fate(True, False, "stop", found)
        return _Fate(last, not last, "length")

    def _stop_of(self, candidate: _Candidate) -> int | str | None:
        if candidate.token_id in self._stop_token_ids:
            return candidate.token_id
        if self._find_stop_string is not None and self.steps >= self.settings.min_tokens:
            return self._find_stop_string([*self.generated(candidate.row), candidate.token_id])
        return None

    def _add(self, candidate: _Candidate, fate: NodeFate) -> int:
        """Add a node to the trie and return its index."""
        self._nodes.append(
            _Node(
                self._row_nodes[candidate.row],
                candidate.token_id,
                candidate.logprob,
                candidate.total,
                (self.steps, candidate.row, candidate.position),
                fate,
            )
        )
        return len(self._nodes) - 1

    def _path(self, node: int) -> list[_Node]:
        path = []
        while node >= 0:
            path.append(self._nodes[node])
            node = path[-1].parent
        return path[::-1]

    def _hypothesis(self, finished: FinishedNode) -> Hypothesis:
        path = self._path(finished.node)
        return Hypothesis(
            [each.token_id for each in path],
            [each.logprob for each in path],
            float(finished.score),
            path[-1].total,
            finished.reason,
            finished.stop,
            [each.place for each in path],
        )


class _DiverseGroup:
    """State of one group of a diverse beam search; an ordinary search has one."""

    def __init__(self, settings: SearchSettings) -> None:
        self.finished = FinishedSet(settings, settings.group_width)
        self.first_row = 0
        self.num_rows = 1
        self.totals = np.zeros(1, dtype=np.float32)
        self.done = False


def _smallest(keys: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the `count` smallest keys, ascending; none of infinite keys and NaN.

    A tie goes to the earlier place.
    """
    places = np.flatnonzero(keys < np.inf)
    if places.size <= count:
        return places
    keys = keys[places]
    largest = np.partition(keys, count - 1)[count - 1]
    chosen = keys < largest
    chosen[np.flatnonzero(keys == largest)[: count - np.count_nonzero(chosen)]] = True
    best: np.ndarray = places[chosen]
    return best
