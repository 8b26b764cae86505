"""Beam search inside a catalogue: :class:`~vllm_trie.beam.BeamSearch` with a node for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from vllm_trie.beam import BeamSearch, Child, Hypothesis, Outcomes, SearchSettings
from vllm_trie.items.trie import ROOT, ItemId, ItemTrie

ItemsEnd = Literal["complete", "eos"]


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
        self, trie: ItemTrie, settings: SearchSettings, eos_token_id: int | None = None
    ) -> None:
        self.trie = trie
        self.search = BeamSearch(settings)
        self.eos_token_id = eos_token_id
        self.nodes = np.array([ROOT], dtype=np.int32)
        self._targets: list[np.ndarray] = []  # of the candidates of each step

    def token_ids(self, targets: np.ndarray) -> np.ndarray:
        """Return int32[rows, k], the tokens of candidates that lead to int32[rows, k] nodes."""
        tokens: np.ndarray = self.trie.tokens[targets]
        if self.eos_token_id is None:
            return tokens
        return np.where(targets == self.nodes[:, None], np.int32(self.eos_token_id), tokens)

    def advance(self, targets: np.ndarray, logprobs: np.ndarray) -> list[Child]:
        """Take one step.

        Args:
            targets: int32[rows, k], the nodes that each row's candidates lead to; the row's own
                node stands for EOS.
            logprobs: float32[rows, k], log-probabilities of their tokens, -inf for none.

        Returns:
            The rows of the next step, empty when the search is done. Mutates the search.
        """
        tokens = self.token_ids(targets)
        if self.eos_token_id is None:
            outcomes = Outcomes(self.trie.is_terminal(targets), self.trie.has_children(targets))
        else:
            goes_on = targets != self.nodes[:, None]
            outcomes = Outcomes(~goes_on, goes_on)
        children = self.search.advance(tokens, logprobs, outcomes)
        self._targets.append(targets)
        parents = [child.parent for child in children]
        self.nodes = targets[parents, [child.position for child in children]]
        return children

    def item_ids(self, hypotheses: Sequence[Hypothesis]) -> list[ItemId]:
        """Return the item of each finished hypothesis."""
        last = [hypothesis.places[-1] for hypothesis in hypotheses]
        nodes = [self._targets[step][row, position] for step, row, position in last]
        return self.trie.item_ids(np.array(nodes, dtype=np.int32))
