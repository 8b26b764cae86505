"""Beam search as a pure algorithm over (parent, token, log-probability).

The search knows nothing about a model or a cache. It is given the best candidates of every row
(running hypothesis) and answers with the rows of the next step, each as a child of an old row. The
hypotheses are paths in a trie of nodes; a row is a node that is still extended.

Semantics are those of Hugging Face's ``generate(num_beams=b)``, with which the results are compared
for equality. :mod:`vllm_trie.beam.reference` is the same thing written to be read.

References: "Efficient Beam Search for Large Language Models Using Trie-Based Decoding" for the
trie; Vijayakumar et al., "Diverse Beam Search", for ``num_beam_groups``; Kool et al., "Stochastic
Beams and Where to Find Them", for the sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.beam.candidates import CandidateRules
from vllm_trie.beam.finished import FinishedNode, FinishedSet
from vllm_trie.beam.settings import SearchSettings
from vllm_trie.beam.trace import NodeFate, SearchTrace

StopStringFinder = Callable[[list[int]], str | None]
"""From the generated tokens of a hypothesis to the stop string its last token completes, if any."""


class Child(NamedTuple):
    """A row of the next step: row `parent` of this step, extended by `token_id`."""

    parent: int
    token_id: int


class Hypothesis(NamedTuple):
    """A hypothesis to return.

    Attributes:
        token_ids: Generated tokens, stop token included.
        logprobs: Raw log-probability of each of them.
        score: Sum of the (rule-adjusted) log-probabilities over ``length ** length_penalty``.
        sum_logprob: That sum.
        reason: ``"stop"`` or ``"length"``.
        stop: Stop token id or stop string, if one ended it.
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
    trace_node: int


class _Candidate(NamedTuple):
    total: float  # a float32 value
    row: int
    position: int
    token_id: int
    logprob: float


class BeamSearch:
    """One search. Feed :meth:`advance` until it says the search is done."""

    def __init__(
        self,
        settings: SearchSettings,
        prompt_token_ids: Sequence[int] = (),
        find_stop_string: StopStringFinder | None = None,
    ) -> None:
        self.settings = settings
        self.steps = 0
        self.done = False
        self.trace = SearchTrace(beam_width=settings.beam_width) if settings.trace else None
        self._rules = CandidateRules(settings, prompt_token_ids)
        self._find_stop_string = find_stop_string
        self._stop_token_ids = frozenset(settings.stop_token_ids)
        self._random = np.random.default_rng(settings.seed) if settings.do_sample else None
        self._nodes: list[_Node] = []
        self._groups = [_Group(settings) for _ in range(settings.num_beam_groups)]
        # Rows of the running hypotheses: every group starts at the one row of the prompt.
        self._row_nodes: list[int] = [-1]

    @property
    def num_rows(self) -> int:
        """Rows whose candidates :meth:`advance` expects."""
        return len(self._row_nodes)

    def generated(self, row: int) -> list[int]:
        """Tokens of a row's hypothesis."""
        return self._path(self._row_nodes[row])

    def advance(self, token_ids: np.ndarray, logprobs: np.ndarray) -> list[Child]:
        """Take one step.

        Args:
            token_ids: int[rows, k], candidates of each row, distinct within a row.
            logprobs: float32[rows, k], their log-probabilities, best first.

        Returns:
            The rows of the next step, empty when the search is done. Mutates the search.

        Raises:
            ValueError: The search is done, or the arrays are not of shape ``[num_rows, k]``.
        """
        if self.done:
            raise ValueError("the search is done; start another one")
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
            kept = self._advance_group(group, token_ids, values, logprobs)
            group.first_row = len(children)
            group.num_rows = len(kept)
            for candidate, node in kept:
                children.append(Child(candidate.row, candidate.token_id))
                nodes.append(node)
                taken.append(candidate.token_id)
        self.steps += 1
        self._row_nodes = nodes
        self.done = not children
        return children

    def hypotheses(self) -> list[Hypothesis]:
        """The best ``beam_width`` finished hypotheses of a search that is done, best first."""
        finished = [hypothesis for group in self._groups for hypothesis in group.finished.best]
        finished.sort(key=lambda hypothesis: -hypothesis.score)
        if self.trace is not None:
            self.trace.returned = [self._nodes[each.node].trace_node for each in finished]
            self.trace.scores = [float(each.score) for each in finished]
            self.trace.steps = self.steps
        return [self._hypothesis(each) for each in finished]

    def _adjust(self, token_ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
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
        group: _Group,
        token_ids: np.ndarray,
        adjusted: np.ndarray,
        raw: np.ndarray,
    ) -> list[tuple[_Candidate, int]]:
        settings = self.settings
        length = self.steps + 1
        last = length == settings.max_new_tokens
        candidates = self._best(group, token_ids, adjusted, raw)
        may_stop = bool(self._stop_token_ids) or self._find_stop_string is not None
        running: list[_Candidate] = []
        finished: list[FinishedNode] = []
        for rank, candidate in enumerate(candidates):
            stop = self._stop_of(candidate) if may_stop else None
            if stop is None and not last:
                running.append(candidate)
            elif rank < settings.group_width:
                fate = NodeFate.FINISHED
                finished.append(
                    FinishedNode(
                        group.finished.score(candidate.total, length),
                        self._add(candidate, fate),
                        "length" if stop is None else "stop",
                        stop,
                    )
                )
            elif self.trace is not None:
                self._record(candidate, NodeFate.DROPPED)
        if finished:
            group.finished.add(finished)
        if self._random is not None:
            running.sort(key=lambda candidate: -candidate.total)
        dropped = running[settings.group_width :]
        del running[settings.group_width :]
        if self.trace is not None:
            for candidate in dropped:
                self._record(candidate, NodeFate.DROPPED)
        kept = [(candidate, self._add(candidate, NodeFate.KEPT)) for candidate in running]
        group.totals = np.array([candidate.total for candidate in running], dtype=np.float32)
        if not kept or group.finished.closed(running[0].total, length):
            group.done = True
            return []
        return kept

    def _best(
        self, group: _Group, token_ids: np.ndarray, adjusted: np.ndarray, raw: np.ndarray
    ) -> list[_Candidate]:
        """The step's candidates: the best, or drawn without replacement (in drawing order)."""
        first = group.first_row
        totals = (adjusted[first : first + group.num_rows] + group.totals[:, None]).ravel()
        if self._random is None:
            keys = -totals
        else:
            # The k largest of log-probability + Gumbel noise are k draws without replacement, in
            # drawing order.
            keys = -(totals + self._random.gumbel(size=totals.size))
        count = self.settings.num_candidates
        if totals.size > count:
            places = np.argpartition(keys, count - 1)[:count]
            places.sort()  # a tie goes to the earlier row, then to the better candidate
            places = places[np.argsort(keys[places], kind="stable")]
        else:
            places = np.argsort(keys, kind="stable")
        rows, positions = np.divmod(places, token_ids.shape[1])
        rows += first
        return [
            candidate
            for candidate in map(
                _Candidate,
                totals[places].tolist(),
                rows.tolist(),
                positions.tolist(),
                token_ids[rows, positions].tolist(),
                raw[rows, positions].tolist(),
            )
            if candidate.total > -np.inf  # not forbidden, and no NaN from a broken model
        ]

    def _stop_of(self, candidate: _Candidate) -> int | str | None:
        if candidate.token_id in self._stop_token_ids:
            return candidate.token_id
        if self._find_stop_string is not None and self.steps >= self.settings.min_tokens:
            return self._find_stop_string([*self.generated(candidate.row), candidate.token_id])
        return None

    def _add(self, candidate: _Candidate, fate: NodeFate) -> int:
        trace_node = self._record(candidate, fate) if self.trace is not None else -1
        self._nodes.append(
            _Node(
                self._row_nodes[candidate.row],
                candidate.token_id,
                candidate.logprob,
                candidate.total,
                (self.steps, candidate.row, candidate.position),
                trace_node,
            )
        )
        return len(self._nodes) - 1

    def _record(self, candidate: _Candidate, fate: NodeFate) -> int:
        assert self.trace is not None
        parent = self._row_nodes[candidate.row]
        return self.trace.add(
            candidate.token_id,
            -1 if parent < 0 else self._nodes[parent].trace_node,
            candidate.total,
            fate,
        )

    def _path(self, node: int) -> list[int]:
        tokens = []
        while node >= 0:
            tokens.append(self._nodes[node].token_id)
            node = self._nodes[node].parent
        return tokens[::-1]

    def _hypothesis(self, finished: FinishedNode) -> Hypothesis:
        path = []
        node = finished.node
        while node >= 0:
            path.append(self._nodes[node])
            node = self._nodes[node].parent
        path.reverse()
        return Hypothesis(
            [each.token_id for each in path],
            [each.logprob for each in path],
            float(finished.score),
            path[-1].total,
            finished.reason,
            finished.stop,
            [each.place for each in path],
        )


class _Group:
    """State of one group of a diverse beam search; an ordinary search has one."""

    __slots__ = ("done", "finished", "first_row", "num_rows", "totals")

    def __init__(self, settings: SearchSettings) -> None:
        self.finished = FinishedSet(settings, settings.group_width)
        self.first_row = 0
        self.num_rows = 1
        self.totals = np.zeros(1, dtype=np.float32)
        self.done = False
