"""The two implementations of the selection behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_trie.drafters.medusa import native, selection
from vllm_trie.drafters.medusa.selection import Limits
from vllm_trie.drafters.ngram_trie.index import NgramIndex
from vllm_trie.tree import TokenTree


class Job(NamedTuple):
    """One request of a batch that a tree is chosen for."""

    tokens: np.ndarray
    """int32 [K, m], contiguous: each head's candidates, likeliest first."""
    probabilities: np.ndarray
    """float32 [K, m], contiguous."""
    limits: Limits
    index: Any | None
    """Index of the request's own text, None for the product of the heads alone."""
    text: np.ndarray
    """int32 [num_tokens], contiguous; the index is brought up to date with it."""


class Backend(Protocol):
    """Chooses trees. All backends choose the same ones, bit for bit."""

    def new_index(self, max_order: int) -> Any: ...
    def select_batch(self, jobs: Sequence[Job]) -> list[TokenTree]:
        """Select for every job; updates the jobs' own indexes."""
        ...


class NativeBackend:
    """The compiled selection."""

    def new_index(self, max_order: int) -> native.NativeIndex:
        return native.NativeIndex(max_order)

    def select_batch(self, jobs: Sequence[Job]) -> list[TokenTree]:
        return native.select_batch(jobs)


class PythonBackend:
    """The readable twin."""

    def new_index(self, max_order: int) -> NgramIndex:
        return NgramIndex(max_order)

    def select_batch(self, jobs: Sequence[Job]) -> list[TokenTree]:
        return [
            selection.select(
                job.tokens, job.probabilities, job.limits, job.index, job.text.tolist()
            )
            for job in jobs
        ]


def choose_backend() -> Backend:
    """The compiled selection where it can be compiled, else the Python one (the reason is
    logged)."""
    return NativeBackend() if native.is_available() else PythonBackend()
