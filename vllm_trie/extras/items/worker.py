"""Candidates inside a catalogue, in the worker.

Of the 2,000 valid children of a hypothesis none may be among the tokens that vLLM's sampler
returns. They come from the logits, and travel as nodes of the trie.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_trie.extras.items.selection import ValidPart, view
from vllm_trie.extras.items.step import Continuations, ItemStep, Normalize, best_continuations
from vllm_trie.extras.items.trie import ItemTrie
from vllm_trie.extras.items.trie_file import ItemsError, open_items
from vllm_trie.searches.engine.constraint import WorkerParts
from vllm_trie.searches.unfetched import Unfetched

_MAX_VERSIONS = 2
"""Versions of a catalogue that stay open: the newest, and the one that running searches may have.
One that searches still have after another change is opened again, without a copy."""


class ItemSelection(NamedTuple):
    """Candidates of a group inside a catalogue.

    Attributes:
        path: The catalogue's file.
        memory: Where the scheduler has its content.
        version: Its digest.
        proxy_id: The request that stands for the group.
        normalize: What the probabilities are normalized over.
        valid_part: Of the catalogue, None for all of it.
        step: The step of the search, with a row for each beam.
    """

    path: str
    memory: str
    version: str
    proxy_id: str
    normalize: Normalize
    valid_part: ValidPart | None
    step: ItemStep

    def kind(self, num_beams: int) -> Normalize:
        """Return what selections have in common that are launched together."""
        return self.normalize

    @staticmethod
    def launch(
        selections: Sequence[ItemSelection], logits: torch.Tensor, worker: WorkerParts
    ) -> Unfetched[list[Continuations]]:
        """Start selections of one kind from float [beams, vocab].

        Raises:
            ItemsError: The file of a catalogue is gone, or another version.
        """
        tries = [view(search._trie(worker.kept), search.valid_part) for search in selections]
        steps = [search.step for search in selections]
        return best_continuations(tries, steps, logits, selections[0].normalize)

    def _trie(self, kept: dict[Any, Any]) -> ItemTrie:
        """Return the catalogue; workers of other hosts than the scheduler's read the file."""
        tries: dict[str, ItemTrie] = kept.setdefault((ItemSelection, self.path), {})
        if self.version not in tries:
            try:
                tries[self.version] = open_items(Path(self.memory), version=self.version)
            except ItemsError:
                tries[self.version] = open_items(Path(self.path), version=self.version)
            for old in [*tries][:-_MAX_VERSIONS]:
                del tries[old]
        return tries[self.version]
