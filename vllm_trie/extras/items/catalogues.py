"""Catalogues in the scheduler, searches inside them, and what it tells the worker about their rows.

The scheduler checks a catalogue's file and keeps the place of each row. With every step, the worker
gets the rows' nodes and chooses candidates among their children. It shares the scheduler's copy of
the file, or reads the file on another host if its digest is the one that the scheduler has checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_trie.extras.items.search import ItemSearch
from vllm_trie.extras.items.selection import Rules, Selection, select, view
from vllm_trie.extras.items.step import Continuations, Normalize
from vllm_trie.extras.items.trie import ROOT, ItemId, ItemTrie
from vllm_trie.extras.items.trie_file import check_tokenizer, open_items
from vllm_trie.extras.items.worker import ItemSelection
from vllm_trie.files.watched_file import WatchedFile
from vllm_trie.searches import Children, Hypothesis, SearchSettings
from vllm_trie.searches.engine.constraint import GroupSearch


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
        tokenizers: dict[Path, str | None] = {}  # fingerprints of the first versions

        def open_catalogue(path: Path) -> Catalogue:
            trie = open_items(path, vocab_size)
            first = tokenizers.setdefault(path, trie.tokenizer)
            check_tokenizer(path, trie.tokenizer, first, "the first version")
            return Catalogue(path, trie)

        self._files = {
            name: WatchedFile(path, open_catalogue, f"catalogue {name!r}")
            for name, path in paths.items()
        }
        self._selections: dict[tuple[str, str], Selection] = {}

    def latest(self, name: str) -> Catalogue:
        """Return the newest checked version of a catalogue."""
        return self._files[name].latest()

    def select(self, catalogue: Catalogue, rules: Rules) -> Selection | None:
        """Return the part of a catalogue that rules allow, None for all of it."""
        if not rules.restrict:
            return None
        key = catalogue.trie.version, json.dumps(rules)
        selection = self._selections.get(key)
        if selection is None:
            selection = self._selections[key] = select(catalogue.trie, rules)
            if len(self._selections) > MAX_SELECTIONS:
                del self._selections[next(iter(self._selections))]
        return selection


class GroupItems(ItemSearch, GroupSearch):
    """The search of a group inside a catalogue."""

    def __init__(
        self,
        catalogue: Catalogue,
        selection: Selection | None,
        normalize: Normalize,
        settings: SearchSettings,
        eos_token_id: int | None,
        weight_factor: float,
    ) -> None:
        trie = view(catalogue.trie, selection)
        super().__init__(trie, settings, eos_token_id, weight_factor)
        self._catalogue, self._selection = catalogue, selection
        self._normalize: Normalize = normalize
        self._valid_children = self._forced_tokens = 0

    def selection(self, proxy_id: str, rows: np.ndarray) -> ItemSelection:
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
        self._valid_children += int(children.sum())
        self._forced_tokens += int((children == 1).sum())
        return super().advance(continuations)

    def described(self, hypothesis: Hypothesis) -> tuple[ItemId | None, dict[str, Any]]:
        if not len(hypothesis.places):  # one that the search did not find
            return None, {}
        (item,) = self.item_ids([hypothesis])
        return item, {"item": item}

    def counts(self) -> dict[str, int]:
        return {
            "item_steps": self.search.steps,
            "valid_children": self._valid_children,
            "forced_tokens": self._forced_tokens,
        }
