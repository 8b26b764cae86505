"""Catalogues in the scheduler, searches inside them, and what it tells the worker about their rows.

The scheduler checks a catalogue's file and keeps the place of each row. With every step, the worker
gets the rows' nodes and chooses candidates among their children. It shares the scheduler's copy of
the file, or reads the file on another host if its digest is the one that the scheduler has checked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from vllm.sampling_params import SamplingParams

from vllm_trie.extras.items import ROOT, ItemTrie, open_items
from vllm_trie.extras.items.search import ItemSearch
from vllm_trie.extras.items.selection import Rules, Selection, select, view
from vllm_trie.extras.items.step import Continuations
from vllm_trie.files.watched_file import WatchedFile
from vllm_trie.hooks.wire import BeamSpec, packed, search_settings
from vllm_trie.searches import BeamOptions, Children
from vllm_trie.searches.engine.search_wire import ItemSelection


class Catalogue(NamedTuple):
    """One version of a catalogue."""

    path: Path
    trie: ItemTrie


MAX_SELECTIONS = 64
"""Selections that are kept for equal requests."""


class Catalogues:
    """Owner of the engine's catalogues; takes new versions up while it serves.

    Searches that run keep the version that they began with.
    """

    def __init__(self, paths: Mapping[str, Path], vocab_size: int) -> None:
        def open_catalogue(path: Path) -> Catalogue:
            return Catalogue(path, open_items(path, vocab_size))

        self._files = {
            name: WatchedFile(path, open_catalogue, f"catalogue {name!r}")
            for name, path in paths.items()
        }
        self._selections: OrderedDict[tuple[str, str], Selection] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._files)

    def latest(self, name: str) -> Catalogue:
        """Return the newest checked version of a catalogue.

        Raises:
            ValueError: There is no catalogue of this name.
        """
        if name not in self._files:
            raise ValueError(f"items={name!r} is no catalogue of this engine")
        return self._files[name].latest()

    def select(self, catalogue: Catalogue, options: BeamOptions) -> Selection | None:
        """Return the part of a catalogue that a request may generate, None for all of it."""
        rules = Rules(
            options.allow_items,
            options.allow_prefixes,
            options.deny_items or (),
            options.deny_prefixes or (),
        )
        if not rules.restrict:
            return None
        key = catalogue.trie.version, packed(options)
        selection = self._selections.get(key)
        if selection is None:
            selection = self._selections[key] = select(catalogue.trie, rules)
            if len(self._selections) > MAX_SELECTIONS:
                self._selections.popitem(last=False)
        return selection


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
