"""What the drafter asks of a backend: indexes of texts, and drafts from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_trie.tree import TokenTree


class Index(Protocol):
    """Texts that are drafted from."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def add_text(self, token_ids: np.ndarray) -> int: ...
    def remove_text(self, text: int) -> None: ...


class Job(NamedTuple):
    """One request of a batch that is drafted for."""

    own: Any
    """Index of the request's own text, brought up to date with `tokens[:num_indexed]`."""
    store: Any | None
    """Index of finished requests."""
    corpus: Any | None
    """Index of a corpus."""
    tokens: np.ndarray
    """int32 [num_tokens], contiguous: the draft continues it."""
    num_indexed: int
    max_nodes: int
    max_depth: int
    chain_only: bool
    min_probability: float = 0.0
    """Nodes whose path is less likely are left out."""


class Draft(NamedTuple):
    """What was drafted for one request."""

    tree: TokenTree
    used_text: int
    """The text of the store that matched, -1 if none did."""


class Backend(Protocol):
    """Makes indexes and drafts from them. All backends make the same trees, bit for bit."""

    def new_index(self, max_order: int) -> Index: ...
    def draft_batch(self, jobs: Sequence[Job]) -> list[Draft]:
        """Draft for every job; updates the jobs' own indexes."""
        ...
