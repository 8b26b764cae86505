"""The two implementations of the blended scoring behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_trie.drafters.ngram_trie import blended, native
from vllm_trie.drafters.ngram_trie.constants import USE_LENGTH
from vllm_trie.drafters.ngram_trie.index import NgramIndex
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


class NativeBackend:
    """The compiled core."""

    def new_index(self, max_order: int) -> Index:
        return native.NativeIndex(max_order)

    def draft_batch(self, jobs: Sequence[Job]) -> list[Draft]:
        return [Draft(*result) for result in native.draft_batch(jobs)]


class PythonBackend:
    """The readable twin."""

    def __init__(self, blend: blended.Blend | None = None) -> None:
        self._blend = blend or blended.Blend()

    def new_index(self, max_order: int) -> Index:
        return NgramIndex(max_order)

    def draft_batch(self, jobs: Sequence[Job]) -> list[Draft]:
        return [self._draft(job) for job in jobs]

    def _draft(self, job: Job) -> Draft:
        job.own.synchronize(job.tokens[: job.num_indexed].tolist())
        indexes = [job.own, *(index for index in (job.store, job.corpus) if index is not None)]
        drafted = self._blend.draft(
            indexes, job.tokens.tolist(), job.max_nodes, job.max_depth, job.chain_only
        )
        used_text = -1
        if job.store is not None and drafted.matches[1].length >= USE_LENGTH:
            used_text = drafted.matches[1].text
        return Draft(drafted.tree, used_text)


def choose_backend() -> Backend:
    """The compiled core where it can be compiled, else the Python one (the reason is logged)."""
    return NativeBackend() if native.is_available() else PythonBackend()
