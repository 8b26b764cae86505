"""Catalogues in the scheduler: their newest versions, and the parts that requests select.

The worker shares the scheduler's copy of a file, or reads the file on another host if its digest is
the one that the scheduler has checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from vllm_trie.extras.items.selection import Rules, ValidPart, select
from vllm_trie.extras.items.trie import ItemTrie
from vllm_trie.extras.items.trie_file import check_tokenizer, open_items
from vllm_trie.files.watched_file import WatchedFile
from vllm_trie.refusal import shown

MAX_VALID_PARTS = 64
"""Valid parts that are kept for equal requests."""


class Catalogues:
    """Owner of the engine's catalogues; takes new versions up while it serves.

    Searches that run keep the version that they began with.
    """

    def __init__(self, paths: Mapping[str, Path], vocab_size: int) -> None:
        tokenizers: dict[Path, str | None] = {}  # fingerprints of the first versions

        def open_catalogue(path: Path) -> ItemTrie:
            trie = open_items(path, vocab_size)
            first = tokenizers.setdefault(path, trie.tokenizer)
            check_tokenizer(path, trie.tokenizer, first, "the first version")
            return trie

        self._files = {
            name: WatchedFile(path, open_catalogue, f"catalogue {name!r}")
            for name, path in paths.items()
        }
        self._valid_parts: dict[tuple[str, str], ValidPart] = {}

    def latest(self, name: str) -> ItemTrie:
        """Return the newest checked version of a catalogue."""
        return self._files[name].latest()

    def select(self, catalogue: ItemTrie, rules: Rules) -> ValidPart | None:
        """Return the part of a catalogue that rules allow, None for all of it.

        Raises:
            ValueError: They have ids of another type. The front end checks them against the newest
                file, which this version may not be.
        """
        if not rules.restrict:
            return None
        kind = int if catalogue.id_texts is None else str
        for ids in (rules.allow_items, rules.deny_items):
            if ids and not isinstance(ids[0], kind):
                raise ValueError(
                    f"item id {shown(ids[0])}: the version of the catalogue that serves has ids of "
                    f"type {kind.__name__}; write them so, or wait until a newer version serves"
                )
        key = catalogue.version, json.dumps(rules)
        valid_part = self._valid_parts.get(key)
        if valid_part is None:
            valid_part = self._valid_parts[key] = select(catalogue, rules)
            if len(self._valid_parts) > MAX_VALID_PARTS:
                del self._valid_parts[next(iter(self._valid_parts))]
        return valid_part
