"""Finished hypotheses of a search, and the rule by which it stops."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_trie.searches.settings import SearchSettings


class FinishedNode(NamedTuple):
    """A finished hypothesis: a leaf of the search trie.

    Attributes:
        score: Sum of log-probabilities over ``length ** length_penalty``, float32.
        node: Index of its last token's node.
        reason: ``"stop"`` for a stop token, a stop string or a complete item, ``"length"`` for
            ``max_new_tokens``.
        stop: The stop token id or stop string, None if something else ended it.
    """

    score: np.float32
    node: int
    reason: str
    stop: int | str | None


class FinishedSet:
    """The best finished hypotheses of a diverse group, best first, at most ``group_width``.

    All arithmetic is float32, as in Hugging Face's ``generate``, to which scores must be equal.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self.best: list[FinishedNode] = []

    def score(self, sums: np.ndarray, length: int) -> np.ndarray:
        """Return float32 [...], the length-normalized scores of sums over `length` tokens.

        Args:
            sums: float32 [...], sums of log-probabilities.
            length: Tokens of each of them.
        """
        scores: np.ndarray = sums / np.float32(length**self._settings.length_penalty)
        return scores

    def add(self, new: list[FinishedNode]) -> None:
        """Merge a step's finished hypotheses; a tie goes to the older one."""
        self.best = sorted([*self.best, *new], key=lambda hypothesis: -hypothesis.score)
        del self.best[self._settings.group_width :]

    def closed(self, best_running: float, length: int) -> bool:
        """Return whether no running hypothesis can change the set.

        Args:
            best_running: Sum of log-probabilities of the best running hypothesis.
            length: Number of its generated tokens.
        """
        settings = self._settings
        if len(self.best) < settings.group_width:
            return False
        if settings.stops_when_full:
            return True
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = settings.max_new_tokens
        best = np.asarray(best_running + settings.most_added, dtype=np.float32)
        attainable = self.score(best, length)
        return not attainable > self.best[-1].score
