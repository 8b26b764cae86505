"""Catalogues in the scheduler, and what it tells the worker about constrained rows.

The scheduler checks a catalogue's file and keeps the place of each row. With every step, the worker
gets the rows' nodes and chooses candidates among their children. It maps the same file, and takes
it only if its digest is the one that the scheduler has checked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from vllm.logger import init_logger

from vllm_trie.items import ItemTrie, file_stamp, open_items
from vllm_trie.items.selection import Selection, select
from vllm_trie.items.step import Normalize
from vllm_trie.vllm_hooks.frontend.beam_options import unpacked
from vllm_trie.vllm_hooks.frontend.item_requests import rules_of

logger = init_logger(__name__)


class ItemStep(NamedTuple):
    """Constrained rows of one group in a step.

    Attributes:
        path: The catalogue's file.
        version: Its digest.
        beam_width: Width of the search.
        eos_token_id: Token that must follow an item, None if nothing follows it.
        normalize: What the probabilities are normalized over.
        row_ids: The rows.
        prompt_len: Tokens that they share.
        selection: The valid part of the catalogue, None for all of it.
        weight_factor: Factor of the items' weights.
        nodes: int32[rows], their places in the trie.
        totals: float32[rows], their cumulative log-probabilities.
    """

    path: str
    version: str
    beam_width: int
    eos_token_id: int | None
    normalize: Normalize
    row_ids: list[str]
    prompt_len: int
    selection: Selection | None
    weight_factor: float
    nodes: np.ndarray
    totals: np.ndarray


class Catalogue(NamedTuple):
    """One version of a catalogue."""

    path: Path
    trie: ItemTrie
    stamp: tuple[int, ...]


MAX_SELECTIONS = 64
"""Selections that are kept for further members of their requests, and for equal requests."""


class Catalogues:
    """Owner of the engine's catalogues; takes new versions up while it serves.

    A file that was replaced is checked in a thread. Searches that start until then, and those that
    run, use the version before.
    """

    def __init__(self, paths: Mapping[str, Path], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._current = {name: self._open(path) for name, path in paths.items()}
        self._opening: dict[str, threading.Thread] = {}
        self._refused: dict[str, tuple[int, ...]] = {}
        self._selections: OrderedDict[tuple[str, str], Selection] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._current)

    def latest(self, name: str) -> Catalogue:
        """Return the newest checked version of a catalogue.

        Raises:
            ValueError: There is no catalogue of this name.
        """
        if name not in self._current:
            raise ValueError(f"items={name!r} is no catalogue of this engine")
        found = self._current[name]
        thread = self._opening.get(name)
        if thread is None or not thread.is_alive():
            try:
                stamp = file_stamp(found.path)
            except OSError:  # gone: the mapped version serves on
                return found
            if stamp not in (found.stamp, self._refused.get(name)):
                thread = threading.Thread(target=self._renew, args=(name, stamp), daemon=True)
                self._opening[name] = thread
                thread.start()
        return found

    def select(self, catalogue: Catalogue, options: str) -> Selection | None:
        """Return the part of a catalogue that a request with these packed options may generate.

        None for all of it.
        """
        rules = rules_of(unpacked(options))
        if not rules.restrict:
            return None
        key = catalogue.trie.version, options
        selection = self._selections.get(key)
        if selection is None:
            selection = self._selections[key] = select(catalogue.trie, rules)
            if len(self._selections) > MAX_SELECTIONS:
                self._selections.popitem(last=False)
        return selection

    def _renew(self, name: str, stamp: tuple[int, ...]) -> None:
        old = self._current[name]
        try:
            new = self._open(old.path)
        except Exception as error:  # whatever is wrong with it, the version before serves on
            self._refused[name] = stamp
            logger.error("The new version of catalogue %r is refused: %s", name, error)
            return
        self._current[name] = new
        logger.info("Catalogue %r has %d items, was %d", name, new.trie.num_items,
                    old.trie.num_items)  # fmt: skip

    def _open(self, path: Path) -> Catalogue:
        try:
            stamp = file_stamp(path)
        except OSError:
            stamp = ()
        return Catalogue(path, open_items(path, self._vocab_size), stamp)
