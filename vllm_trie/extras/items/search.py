"""Beam search inside a catalogue: a search with a node for each row.

With every step, the worker gets the rows' nodes and chooses candidates among their children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_trie.extras.items.selection import ValidPart, view
from vllm_trie.extras.items.step import (
    Continuations,
    ItemStep,
    Normalize,
    nodes_of,
    tokens_of,
)
from vllm_trie.extras.items.trie import ROOT, ItemId, ItemTrie
from vllm_trie.extras.items.worker import ItemSelection
from vllm_trie.searches import (
    BeamSearch,
    Candidates,
    Children,
    Hypothesis,
    Outcomes,
    SearchSettings,
)
from vllm_trie.searches.engine.constraint import GroupSearch


class ItemSearch(GroupSearch):
    """The search of a group whose hypotheses are items.

    Attributes:
        nodes: int32 [rows], the node of each row.
    """

    def __init__(
        self,
        catalogue: ItemTrie,
        valid_part: ValidPart | None,
        normalize: Normalize,
        settings: SearchSettings,
        eos_token_id: int | None,
        weight_factor: float,
    ) -> None:
        """Begin a search.

        Args:
            catalogue: Where it searches.
            valid_part: Of the catalogue, None for all of it.
            normalize: What the probabilities are normalized over.
            settings: Of a search of tokens.
            eos_token_id: Token that must follow an item; None if an item ends the hypothesis.
            weight_factor: Factor of the items' weights.
        """
        self._catalogue, self._valid_part = catalogue, valid_part
        self._trie = view(catalogue, valid_part)
        low, high = self._trie.weight_range
        most = max(weight_factor * low, weight_factor * high)
        self.search = BeamSearch(replace(settings, most_added=most))
        self.nodes = np.array([ROOT], dtype=np.int32)
        self._normalize: Normalize = normalize
        self._eos_token_id = eos_token_id
        self._weight_factor = weight_factor
        self._steps: list[Continuations] = []

    def selection(self, proxy_id: str, rows: np.ndarray) -> ItemSelection:
        step = ItemStep(
            self.nodes[rows],
            self.search.totals[rows],
            self.search.settings.beam_width,
            self._eos_token_id,
            self._weight_factor,
        )
        catalogue = self._catalogue
        place = str(catalogue.path), catalogue.memory, catalogue.version
        return ItemSelection(*place, proxy_id, self._normalize, self._valid_part, step)

    def advance(self, continuations: Continuations) -> Children:
        """Take a step with the continuations of all rows.

        Raises:
            RuntimeError: None of them is possible: the model's logits are no numbers.
        """
        rows, targets, logprobs = continuations
        possible = (logprobs > -np.inf).any()
        if not possible and self._trie.has_children(np.array([ROOT])).all():
            raise RuntimeError("no row has a possible candidate")
        tokens = tokens_of(self._trie, targets, self._eos_token_id)
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
        added = self._weight_factor * self._trie.item_weights(self._item_nodes(hypotheses))
        return [
            hypothesis._replace(
                logprobs=[*hypothesis.logprobs[:-1], hypothesis.logprobs[-1] - float(weight)]
            )
            for hypothesis, weight in zip(hypotheses, added, strict=True)
        ]

    def described(self, hypothesis: Hypothesis) -> tuple[ItemId | None, dict[str, Any]]:
        if not len(hypothesis.places):  # one that the search did not find
            return None, {}
        (item,) = self._catalogue.item_ids(self._item_nodes([hypothesis]))
        return item, {"item": item}

    def _item_nodes(self, hypotheses: Sequence[Hypothesis]) -> np.ndarray:
        """Return the nodes at which the items of hypotheses end."""
        targets = []
        for hypothesis in hypotheses:
            step, row, position = hypothesis.places[-1]
            first = np.searchsorted(self._steps[step].rows, row)
            targets.append(self._steps[step].targets[first + position])
        return nodes_of(np.array(targets, dtype=np.int32))
