"""The finished hypotheses of a search and the rule when it may stop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_trie.beam.settings import SearchSettings


class FinishedNode(NamedTuple):
    """A finished hypothesis: a leaf of the search trie.

    Attributes:
        score: Sum of log-probabilities over ``length ** length_penalty``, float32.
        node: Index of its last token's node.
        reason: ``"stop"`` for a stop token or stop string, ``"length"`` for ``max_new_tokens``.
        stop: The stop token id or stop string, None if the length ended it.
    """

    score: np.float32
    node: int
    reason: str
    stop: int | str | None


class FinishedSet:
    """The best finished hypotheses, best first, at most ``capacity`` of them.

    All arithmetic is float32, as in Hugging Face's ``generate``: scores are compared for equality
    with it.
    """

    def __init__(self, settings: SearchSettings, capacity: int) -> None:
        self._capacity = capacity
        self._penalty = settings.length_penalty
        self._stops_when_full = settings.stops_when_full
        self._final_length = (
            settings.max_new_tokens
            if settings.early_stopping == "never" and settings.length_penalty > 0
            else None
        )
        self._best: list[FinishedNode] = []

    @property
    def best(self) -> list[FinishedNode]:
        """Best first. Do not modify."""
        return self._best

    @property
    def full(self) -> bool:
        """Whether ``capacity`` hypotheses are finished."""
        return len(self._best) == self._capacity

    def score(self, sum_logprob: float, length: int) -> np.float32:
        """Length-normalized score; `sum_logprob` is a float32 value, `length` in tokens."""
        return np.float32(sum_logprob) / np.float32(length**self._penalty)

    def add(self, new: list[FinishedNode]) -> None:
        """Merge the step's finished hypotheses; a tie goes to the older one."""
        self._best = sorted([*self._best, *new], key=lambda hypothesis: -hypothesis.score)
        del self._best[self._capacity :]

    def closed(self, best_running: float, length: int) -> bool:
        """Whether nothing that still runs can change the set.

        Args:
            best_running: Sum of log-probabilities of the best running hypothesis.
            length: Its generated tokens.
        """
        if not self.full:
            return False
        if self._stops_when_full:
            return True
        attainable = self.score(best_running, self._final_length or length)
        return not attainable > self._best[-1].score
