"""Beam search as a pure algorithm over (parent, token, log-probability).

The search knows neither a model nor a cache. A step takes the best candidates of every row (running
hypothesis), or of all rows together, and returns the rows of the next step, each as a child of an
old row. Hypotheses are paths in a trie of nodes; a row is a node that is still extended. All of
them are arrays: a step has no loop over rows, unless the request has rules.

The semantics are those of Hugging Face's ``generate(num_beams=b)``; tests compare the results for
equality. ``tests/unit/beam/reference.py`` is the same search, written to be read.

References: "Efficient Beam Search for Large Language Models Using Trie-Based Decoding" for the
trie; Vijayakumar et al., "Diverse Beam Search", for ``num_beam_groups``; Kool et al., "Stochastic
Beams and Where to Find Them", for the sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_trie.searches.candidates import CandidateRules, Candidates, Draws, Outcomes
from vllm_trie.searches.finished import FinishedNode, FinishedSet
from vllm_trie.searches.nodes import DROPPED, FATES, FINISHED, KEPT, NodeArrays, Nodes
from vllm_trie.searches.settings import SearchSettings
from vllm_trie.searches.trace import SearchTrace

StopStringFinder = Callable[[list[int]], str | None]
"""Returns the stop string that the last of a hypothesis' generated tokens completes, if any."""


@dataclass(frozen=True, slots=True)
class Children:
    """The rows of the next step, best first.

    Attributes:
        parents: int64 [rows], the row of this step that each of them extends.
        token_ids: int64 [rows], the token that it adds.
        candidates: int64 [rows], its place among the candidates of the step.
    """

    parents: np.ndarray
    token_ids: np.ndarray
    candidates: np.ndarray

    def __len__(self) -> int:
        return len(self.parents)


class Hypothesis(NamedTuple):
    """A finished hypothesis.

    Attributes:
        token_ids: Generated tokens, stop token included.
        logprobs: Raw log-probability of each of them.
        score: Sum of the (rule-adjusted) log-probabilities over ``length ** length_penalty``.
        sum_logprob: That sum.
        reason: ``"stop"`` or ``"length"``.
        stop: Stop token id or stop string that ended it, None if something else did.
        places: int64 [tokens, 3], step, row and position among the row's candidates.
    """

    token_ids: list[int]
    logprobs: list[float]
    score: float
    sum_logprob: float
    reason: str
    stop: int | str | None
    places: np.ndarray


class _Fates(NamedTuple):
    """The outcome of a step's candidates, best first; one that is complete may also go on.

    Attributes:
        ends: bool [c].
        continues: bool [c].
        stops: Place among the candidates to the stop token or stop string that it completes.
    """

    ends: np.ndarray
    continues: np.ndarray
    stops: dict[int, int | str]


class BeamSearch:
    """One search: call :meth:`advance` until ``done``, then :meth:`hypotheses`.

    Attributes:
        settings: The settings of the search.
        steps: Steps taken.
        done: Whether the search is over.
        generated: int64 [rows, steps], the generated tokens of each row.
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
        self.generated = np.zeros((1, 0), dtype=np.int64)
        self.trace: SearchTrace | None = None
        self._rules = CandidateRules(settings, prompt_token_ids)
        self._find_stop_string = find_stop_string
        self._seeds = np.random.SeedSequence(settings.seed)
        self._random = np.random.default_rng(self._seeds) if settings.do_sample else None
        self._nodes = Nodes()
        # Every diverse group starts at the one row of the prompt.
        self._groups = [_DiverseGroup(settings) for _ in range(settings.num_beam_groups)]
        self._row_nodes = np.array([-1])

    @property
    def num_rows(self) -> int:
        """The number of rows whose candidates :meth:`advance` expects."""
        return len(self._row_nodes)

    @property
    def totals(self) -> np.ndarray:
        """Cumulative log-probabilities float32 [num_rows] of a search without diverse groups."""
        return self._groups[0].totals

    @property
    def takes_best_of_all(self) -> bool:
        """Whether a step needs only the best ``num_candidates`` continuations of all rows together.

        Rules, sampling and diverse groups need the best of every row.
        """
        return not self._rules.active and len(self._groups) == 1

    def num_raw_candidates(self, vocab_size: int) -> int:
        """Return how many of the best continuations of every row the next step needs."""
        return self._rules.num_raw(self.generated, vocab_size)

    def draws(self, first_row: int) -> Draws | None:
        """Return how to draw a step's candidates out of all continuations of rows together.

        None if they are not drawn, or only out of some of each row.

        Args:
            first_row: The first of the rows. Each draw of a search has a seed of its own.
        """
        settings = self.settings
        is_filtered = settings.top_k > 0 or settings.top_p < 1.0
        if self._random is None or is_filtered or self._rules.changes:
            return None
        seeds = np.random.SeedSequence(self._seeds.entropy, spawn_key=(self.steps, first_row))
        seed = int(seeds.generate_state(1, np.uint64)[0]) >> 1
        return Draws(settings.temperature, seed)

    @property
    def finds_stop_strings(self) -> bool:
        """Whether the text of a hypothesis can end it."""
        return self._find_stop_string is not None

    def advance(self, candidates: Candidates, outcomes: Outcomes | None = None) -> Children:
        """Take one step.

        Args:
            candidates: Of the rows; with the bias, which is added here, best first within a row.
            outcomes: What the candidates lead to; None if stop tokens and the length decide. A
                hypothesis that is not complete at the greatest length is dropped.

        Returns:
            The rows of the next step, none when the search is done. Mutates the search.

        Raises:
            ValueError: The search is done, or a candidate extends a row that does not exist.
        """
        if self.done:
            raise ValueError("the search is done; start a new one")
        rows, token_ids = candidates.rows, candidates.token_ids
        if rows.size and not 0 <= rows[0] <= rows[-1] < self.num_rows:
            raise ValueError(
                f"candidates must extend rows 0 to {self.num_rows - 1} in ascending order, got "
                f"rows {rows[0]} to {rows[-1]}"
            )
        starts = np.searchsorted(rows, np.arange(self.num_rows + 1))
        adjusted = self._adjust(candidates, starts)
        children = [np.zeros(0, dtype=np.int64)]
        nodes = [np.zeros(0, dtype=np.int64)]
        num_children = 0
        for group in self._groups:
            if group.done:
                continue
            values = adjusted
            if num_children and self.settings.diversity_penalty:
                values = adjusted - self._diversity(token_ids, token_ids[np.concatenate(children)])
            kept, kept_nodes = self._advance_group(group, candidates, values, starts, outcomes)
            group.first_row, group.num_rows = num_children, len(kept)
            children.append(kept)
            nodes.append(kept_nodes)
            num_children += len(kept)
        self.steps += 1
        self._row_nodes = np.concatenate(nodes)
        self.done = not num_children
        chosen = np.concatenate(children)
        result = Children(rows[chosen], token_ids[chosen], chosen)
        self.generated = np.concatenate(
            [self.generated[result.parents], result.token_ids[:, None]], axis=1
        )
        return result

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best ``beam_width`` hypotheses of a search that is done, best first."""
        finished = [hypothesis for group in self._groups for hypothesis in group.finished.best]
        finished.sort(key=lambda hypothesis: -hypothesis.score)
        nodes = self._nodes.all()
        if self.settings.trace:
            self.trace = SearchTrace(
                token_ids=nodes.token_ids.tolist(),
                parents=nodes.parents.tolist(),
                sums=nodes.totals.tolist(),
                fates=[str(FATES[fate]) for fate in nodes.fates],
                returned=[ending.node for ending in finished],
                scores=[float(ending.score) for ending in finished],
                steps=self.steps,
                beam_width=self.settings.beam_width,
            )
        ends = np.array([ending.node for ending in finished], dtype=np.int64)
        paths = self._nodes.paths(ends)
        places = np.stack([nodes.steps, nodes.rows, nodes.positions], axis=1)[paths]
        lengths = (nodes.steps[ends] + 1).tolist()
        token_ids, logprobs = nodes.token_ids[paths].tolist(), nodes.logprobs[paths].tolist()
        return [
            Hypothesis(
                token_ids[i][:length],
                logprobs[i][:length],
                float(ending.score),
                total,
                ending.reason,
                ending.stop,
                places[i][:length],
            )
            for i, (ending, length, total) in enumerate(
                zip(finished, lengths, nodes.totals[ends].tolist(), strict=True)
            )
        ]

    def _adjust(self, candidates: Candidates, starts: np.ndarray) -> np.ndarray:
        token_ids = candidates.token_ids
        logprobs = self._rules.add_bias(token_ids, candidates.logprobs)
        if candidates.keys is not None:
            return logprobs / np.float32(self.settings.temperature)
        if not self._rules.active:
            return logprobs
        result = np.empty(len(logprobs), dtype=np.float32)
        for row in np.flatnonzero(np.diff(starts)):
            mine = slice(starts[row], starts[row + 1])
            result[mine] = self._rules.apply(
                token_ids[mine], logprobs[mine], self.generated[row].tolist()
            )
        return result

    def _diversity(self, token_ids: np.ndarray, taken: np.ndarray) -> np.ndarray:
        tokens, counts = np.unique(taken, return_counts=True)
        place = np.minimum(np.searchsorted(tokens, token_ids), tokens.size - 1)
        occurrences = np.where(tokens[place] == token_ids, counts[place], 0)
        return occurrences.astype(np.float32) * np.float32(self.settings.diversity_penalty)

    def _advance_group(
        self,
        group: _DiverseGroup,
        candidates: Candidates,
        adjusted: np.ndarray,
        starts: np.ndarray,
        outcomes: Outcomes | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take one step of a diverse group; return its running candidates and their nodes."""
        settings, width = self.settings, self.settings.group_width
        length = self.steps + 1
        chosen, totals, outcomes = self._choose(group, candidates, adjusted, starts, outcomes)
        rows, token_ids = candidates.rows[chosen], candidates.token_ids[chosen]
        fates = self._fates(rows, token_ids, outcomes)
        counts = fates.ends & (np.arange(len(chosen)) < width)
        over = counts | ~fates.continues if settings.trace else counts
        running = np.flatnonzero(fates.continues)
        if self._random is not None:
            running = running[np.argsort(-totals[running], kind="stable")]
        kept, rest = running[:width], running[width:] if settings.trace else running[:0]

        # Nodes: those that are over, those that run and are not kept, and those that are kept.
        ended = np.flatnonzero(over)
        order = np.concatenate([ended, rest, kept])
        fate = np.full(len(order), DROPPED, dtype=np.uint8)
        fate[: len(ended)][counts[ended]] = FINISHED
        fate[len(order) - len(kept) :] = KEPT
        first = self._nodes.add(
            NodeArrays(
                self._row_nodes[rows[order]],
                token_ids[order],
                candidates.logprobs[chosen[order]],
                totals[order],
                np.full(len(order), self.steps),
                rows[order],
                chosen[order] - starts[rows[order]],
                fate,
            )
        )
        if counts.any():
            finished = ended[counts[ended]]
            scores = group.finished.score(totals[finished], length)
            nodes = first + np.flatnonzero(counts[ended])
            new = []
            for score, node, place in zip(scores, nodes.tolist(), finished.tolist(), strict=True):
                reason = "stop" if place in fates.stops or outcomes is not None else "length"
                new.append(FinishedNode(score, node, reason, fates.stops.get(place)))
            group.finished.add(new)
        group.totals = totals[kept]
        if not len(kept) or group.finished.closed(float(totals[kept[0]]), length):
            group.done = True
            kept = kept[:0]
        return chosen[kept], np.arange(len(kept)) + first + len(order) - len(kept)

    def _choose(
        self,
        group: _DiverseGroup,
        candidates: Candidates,
        adjusted: np.ndarray,
        starts: np.ndarray,
        outcomes: Outcomes | None,
    ) -> tuple[np.ndarray, np.ndarray, Outcomes | None]:
        """Return the candidates that a group looks at, best first, their totals and outcomes."""
        mine = slice(starts[group.first_row], starts[group.first_row + group.num_rows])
        totals = adjusted[mine] + group.totals[candidates.rows[mine] - group.first_row]
        # The k largest of log-probability + Gumbel noise are k draws without replacement.
        if candidates.keys is not None:
            keys = -candidates.keys[mine]
        elif self._random is not None:
            keys = -(totals + self._random.gumbel(size=totals.size))
        else:
            keys = -totals  # infinite if forbidden, NaN from a broken model
        if outcomes is None:
            best = self._best(keys, None)
            return mine.start + best, totals[best], None
        best = self._best(keys, Outcomes(outcomes.ends[mine], outcomes.continues[mine]))
        chosen = mine.start + best
        return chosen, totals[best], Outcomes(outcomes.ends[chosen], outcomes.continues[chosen])

    def _best(self, keys: np.ndarray, outcomes: Outcomes | None) -> np.ndarray:
        """Return the places of a group's candidates, those with the smallest keys."""
        if outcomes is None:
            places = _smallest(keys, self.settings.num_candidates)
        else:  # of two equal ones that end and go on, neither may push the other out
            width = self.settings.group_width
            kinds = map(np.flatnonzero, outcomes)
            places = np.union1d(*(kind[_smallest(keys[kind], width)] for kind in kinds))
        # A tie goes to the earlier row, then to the better candidate.
        return places[np.argsort(keys[places], kind="stable")]

    def _fates(self, rows: np.ndarray, token_ids: np.ndarray, outcomes: Outcomes | None) -> _Fates:
        last = self.steps + 1 == self.settings.max_new_tokens
        ends = np.isin(token_ids, self.settings.stop_token_ids)
        stops: dict[int, int | str] = {
            place: int(token_ids[place]) for place in np.flatnonzero(ends).tolist()
        }
        if outcomes is not None:
            return _Fates(outcomes.ends, outcomes.continues & (not last), stops)
        if self._find_stop_string is not None and self.steps >= self.settings.min_tokens:
            num_running = 0
            for place in np.flatnonzero(~ends):
                if num_running == self.settings.group_width and self._random is None:
                    break
                token = int(token_ids[place])
                stop = self._find_stop_string([*self.generated[rows[place]].tolist(), token])
                if stop is None:
                    num_running += 1
                else:
                    stops[int(place)] = stop
            ends[list(stops)] = True
        return _Fates(ends | last, ~ends & (not last), stops)


class _DiverseGroup:
    """State of one group of a diverse beam search; an ordinary search has one."""

    def __init__(self, settings: SearchSettings) -> None:
        self.finished = FinishedSet(settings)
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
