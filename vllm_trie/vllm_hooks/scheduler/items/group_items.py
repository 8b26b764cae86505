"""The part of a group that searches inside a catalogue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.sampling_params import SamplingParams

from vllm_trie.beam import Children, Hypothesis
from vllm_trie.items import ROOT, ItemId
from vllm_trie.items.search import ItemSearch
from vllm_trie.items.selection import view
from vllm_trie.items.step import Continuations
from vllm_trie.vllm_hooks.beam_wire import ItemSelection
from vllm_trie.vllm_hooks.scheduler.items.catalogues import Catalogues
from vllm_trie.vllm_hooks.wire import BeamSpec, search_settings


class GroupItems:
    """The search of a constrained group, and what passes between it and the worker.

    Attributes:
        search: The search over tokens.
        counts: For metrics, over all steps: children that hypotheses could go to, and hypotheses
            that could go to one only.
    """

    def __init__(
        self, catalogues: Catalogues, spec: BeamSpec, params: SamplingParams, max_new_tokens: int
    ) -> None:
        assert spec.options.items is not None
        self._catalogue = catalogue = catalogues.latest(spec.options.items)
        self._options = spec.options
        self._eos = params.eos_token_id if spec.options.items_end == "eos" else None
        options = spec.options
        self._selection = catalogues.select(catalogue, options)
        trie = view(catalogue.trie, self._selection)
        needed = catalogue.trie.max_length + (spec.options.items_end == "eos")
        if max_new_tokens < needed:
            raise ValueError(
                f"the longest item needs {needed} tokens, the request has room for "
                f"{max_new_tokens}; raise max_tokens or shorten the prompt"
            )
        settings = search_settings(params, spec, needed)
        self._items = ItemSearch(trie, settings, self._eos, options.weight_factor)
        self.search = self._items.search
        self.counts = {"valid_children": 0, "forced_tokens": 0}

    def selection(self, proxy_id: str, rows: np.ndarray) -> ItemSelection:
        """Return what the worker needs to select candidates of some rows of the search."""
        return ItemSelection(
            str(self._catalogue.path),
            self._catalogue.trie.version,
            self.search.settings.beam_width,
            self._eos,
            self._options.normalize,
            proxy_id,
            self._selection,
            self._options.weight_factor,
            self._items.nodes[rows],
            self.search.totals[rows],
        )

    def advance(self, continuations: Continuations) -> Children:
        """Take a step with the continuations of all rows.

        Raises:
            RuntimeError: None of them is possible: the model's logits are no numbers.
        """
        start = np.array([ROOT])
        possible = (continuations.logprobs > -np.inf).any()
        if not possible and self._items.trie.has_children(start).all():
            raise RuntimeError("no row has a possible candidate")
        children = self._items.trie.num_children(self._items.nodes)
        self.counts["valid_children"] += int(children.sum())
        self.counts["forced_tokens"] += int((children == 1).sum())
        return self._items.advance(continuations)

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best hypotheses of a search that is done, best first."""
        return self._items.hypotheses()

    def item_ids(self, hypotheses: Sequence[Hypothesis]) -> list[ItemId]:
        """Return the item of each finished hypothesis."""
        return self._items.item_ids(hypotheses)
