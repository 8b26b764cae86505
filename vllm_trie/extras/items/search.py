"""Beam search inside a catalogue: a search with a node for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_trie.extras.items.step import Continuations, Trie, nodes_of, tokens_of
from vllm_trie.extras.items.trie import ROOT, ItemId
from vllm_trie.searches import (
    BeamSearch,
    Candidates,
    Children,
    Hypothesis,
    Outcomes,
    SearchSettings,
)


class ItemSearch:
    """One search whose hypotheses are items.

    A step takes the candidates of :func:`~vllm_trie.extras.items.step.best_continuations`.

    Attributes:
        trie: The catalogue.
        search: The search over tokens.
        eos_token_id: Token that must follow a complete item; None if an item ends the hypothesis.
        nodes: int32 [rows], the node of each row.
    """

    def __init__(
        self,
        trie: Trie,
        settings: SearchSettings,
        eos_token_id: int | None = None,
        weight_factor: float = 0.0,
    ) -> None:
        self.trie = trie
        low, high = trie.weight_range
        most = max(weight_factor * low, weight_factor * high)
        self.search = BeamSearch(replace(settings, most_added=most))
        self.eos_token_id = eos_token_id
        self.nodes = np.array([ROOT], dtype=np.int32)
        self._weight_factor = weight_factor
        self._steps: list[Continuations] = []

    def advance(self, continuations: Continuations) -> Children:
        """Take one step with the continuations of all rows.

        Returns:
            The rows of the next step, none when the search is done. Mutates the search.
        """
        rows, targets, logprobs = continuations
        tokens = tokens_of(self.trie, targets, self.eos_token_id)
        children = self.search.advance(
            Candidates(rows, tokens, logprobs), Outcomes(targets < 0, targets >= 0)
        )
        self._steps.append(continuations)
        self.nodes = targets[children.candidates]
        return children

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best hypotheses of a search that is done, best first.

        Weights count in their scores, and not in the log-probabilities of their tokens.
        """
        hypotheses = self.search.hypotheses()
        if not self._weight_factor or not hypotheses:
            return hypotheses
        added = self._weight_factor * self.trie.item_weights(self._item_nodes(hypotheses))
        return [
            hypothesis._replace(
                logprobs=[*hypothesis.logprobs[:-1], hypothesis.logprobs[-1] - float(weight)]
            )
            for hypothesis, weight in zip(hypotheses, added, strict=True)
        ]

    def item_ids(self, hypotheses: Sequence[Hypothesis]) -> list[ItemId]:
        """Return the item of each finished hypothesis."""
        return self.trie.item_ids(self._item_nodes(hypotheses))

    def _item_nodes(self, hypotheses: Sequence[Hypothesis]) -> np.ndarray:
        targets = []
        for hypothesis in hypotheses:
            step, row, position = hypothesis.places[-1]
            first = np.searchsorted(self._steps[step].rows, row)
            targets.append(self._steps[step].targets[first + position])
        return nodes_of(np.array(targets, dtype=np.int32))
