"""The part of a group that searches inside a catalogue."""

from __future__ import annotations

import numpy as np
from vllm.sampling_params import SamplingParams

from vllm_trie.beam import Children
from vllm_trie.items import ROOT
from vllm_trie.items.search import ItemSearch
from vllm_trie.items.selection import view
from vllm_trie.items.step import Continuations
from vllm_trie.vllm_hooks.beam_wire import ItemSelection
from vllm_trie.vllm_hooks.scheduler.items.catalogues import Catalogues
from vllm_trie.vllm_hooks.wire import BeamSpec, search_settings


class GroupItems(ItemSearch):
    """The search of a constrained group, and what passes between it and the worker.

    Attributes:
        counts: For metrics, over all steps: children that hypotheses could go to, and hypotheses
            that could go to one only.
    """

    def __init__(
        self, catalogues: Catalogues, spec: BeamSpec, params: SamplingParams, max_new_tokens: int
    ) -> None:
        options = spec.options
        assert options.items is not None
        self._catalogue = catalogues.latest(options.items)
        self._normalize = options.normalize
        self._selection = catalogues.select(self._catalogue, options)
        needed = self._catalogue.trie.max_length + (options.items_end == "eos")
        if max_new_tokens < needed:
            raise ValueError(
                f"the longest item needs {needed} tokens, the request has room for "
                f"{max_new_tokens}; raise max_tokens or shorten the prompt"
            )
        super().__init__(
            view(self._catalogue.trie, self._selection),
            search_settings(params, spec, needed),
            params.eos_token_id if options.items_end == "eos" else None,
            options.weight_factor,
        )
        self.counts = {"valid_children": 0, "forced_tokens": 0}

    def selection(self, proxy_id: str, rows: np.ndarray) -> ItemSelection:
        """Return what the worker needs to select candidates of some rows of the search."""
        return ItemSelection(
            str(self._catalogue.path),
            self._catalogue.trie.memory,
            self._catalogue.trie.version,
            self.search.settings.beam_width,
            self.eos_token_id,
            self._normalize,
            proxy_id,
            self._selection,
            self._weight_factor,
            self.nodes[rows],
            self.search.totals[rows],
        )

    def advance(self, continuations: Continuations) -> Children:
        """Take a step with the continuations of all rows.

        Raises:
            RuntimeError: None of them is possible: the model's logits are no numbers.
        """
        possible = (continuations.logprobs > -np.inf).any()
        if not possible and self.trie.has_children(np.array([ROOT])).all():
            raise RuntimeError("no row has a possible candidate")
        children = self.trie.num_children(self.nodes)
        self.counts["valid_children"] += int(children.sum())
        self.counts["forced_tokens"] += int((children == 1).sum())
        return super().advance(continuations)
