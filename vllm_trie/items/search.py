"""Beam search inside a catalogue: :class:`~vllm_trie.beam.BeamSearch` with a node for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_trie.beam import BeamSearch, Child, Hypothesis, Outcomes, SearchSettings
from vllm_trie.items.step import Trie, nodes_of, tokens_of
from vllm_trie.items.trie import ROOT, ItemId


class ItemSearch:
    """One search whose hypotheses are items.

    A step takes the candidates of :func:`~vllm_trie.items.step.best_continuations`.

    Attributes:
        trie: The catalogue.
        search: The search over tokens.
        eos_token_id: Token that must follow a complete item; None if an item ends the hypothesis.
        nodes: int32[rows], the node of each row.
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
        self._targets: list[np.ndarray] = []  # of the candidates of each step

    def advance(self, targets: np.ndarray, logprobs: np.ndarray) -> list[Child]:
        """Take one step.

        Args:
            targets: int32[rows, k], the nodes that each row's candidates lead to; ``~node`` for a
                candidate that completes the item of the node.
            logprobs: float32[rows, k], what each adds to the score, -inf for no candidate.

        Returns:
            The rows of the next step, empty when the search is done. Mutates the search.
        """
        tokens = tokens_of(self.trie, targets, self.eos_token_id)
        children = self.search.advance(tokens, logprobs, Outcomes(targets < 0, targets >= 0))
        self._targets.append(targets)
        parents = [child.parent for child in children]
        self.nodes = targets[parents, [child.position for child in children]]
        return children

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best hypotheses of a search that is done, best first.

        Weights count in their scores, and not in the log-probabilities of their tokens.
        """
        found = self.search.hypotheses()
        if not self._weight_factor or not found:
            return found
        added = self._weight_factor * self.trie.item_weights(self._item_nodes(found))
        return [
            each._replace(logprobs=[*each.logprobs[:-1], each.logprobs[-1] - float(own)])
            for each, own in zip(found, added, strict=True)
        ]

    def item_ids(self, hypotheses: Sequence[Hypothesis]) -> list[ItemId]:
        """Return the item of each finished hypothesis."""
        return self.trie.item_ids(self._item_nodes(hypotheses))

    def _item_nodes(self, hypotheses: Sequence[Hypothesis]) -> np.ndarray:
        last = [hypothesis.places[-1] for hypothesis in hypotheses]
        targets = [self._targets[step][row, position] for step, row, position in last]
        return nodes_of(np.array(targets, dtype=np.int32))
