"""The two implementations of the selection behind one interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from vllm_trie.drafters.medusa import native, selection
from vllm_trie.drafters.medusa.candidates import HeadLogits, top_candidates_torch
from vllm_trie.drafters.medusa.selection import Limits
from vllm_trie.ngrams.index import NgramIndex
from vllm_trie.tree import TokenTree


class Job(NamedTuple):
    """One request of a batch that a tree is chosen for."""

    index: Any | None
    """Index of the request's own text, None for the product of the heads alone."""
    text: np.ndarray
    """int32 [num_tokens]; the index is brought up to date with it."""
    max_nodes: int
    max_depth: int
    chain_only: bool
    min_probability: float = 0.0
    """Nodes whose path is less likely are left out."""


class Backend(Protocol):
    """Chooses trees. All backends choose the same ones, bit for bit, from the same candidates."""

    def new_index(self, max_order: int) -> Any: ...
    def select_batch(
        self, tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
    ) -> list[TokenTree]:
        """Select for every job; updates the jobs' own indexes.

        Args:
            tokens, probabilities: int32 and float32 [jobs, K, m], contiguous: each head's
                candidates, likeliest first, all different.
        """
        ...

    def draft_batch(
        self, jobs: Sequence[Job], ask_heads: Callable[[], HeadLogits]
    ) -> list[TokenTree]:
        """Find the candidates, then select from them.

        Args:
            ask_heads: is called once; row i of the logits that it returns is job i's.
        """
        ...


class NativeBackend:
    """The compiled selection.

    Args:
        reads_logits: whether the candidates are found by compiled code, too, which there is for
            logits in a CPU's memory.
    """

    def __init__(self, reads_logits: bool = True) -> None:
        self._reads_logits = reads_logits

    def new_index(self, max_order: int) -> native.NativeIndex:
        return native.NativeIndex(max_order)

    def select_batch(
        self, tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
    ) -> list[TokenTree]:
        return native.select_batch(tokens, probabilities, jobs)

    def draft_batch(
        self, jobs: Sequence[Job], ask_heads: Callable[[], HeadLogits]
    ) -> list[TokenTree]:
        if self._reads_logits:
            return native.draft_batch(jobs, ask_heads)
        return native.select_batch(*top_candidates_torch(ask_heads()), jobs)


class PythonBackend:
    """The readable twin."""

    def new_index(self, max_order: int) -> NgramIndex:
        return NgramIndex(max_order)

    def select_batch(
        self, tokens: np.ndarray, probabilities: np.ndarray, jobs: Sequence[Job]
    ) -> list[TokenTree]:
        return [
            selection.select(tokens[i], probabilities[i], Limits(*limits), index, text.tolist())
            for i, (index, text, *limits) in enumerate(jobs)
        ]

    def draft_batch(
        self, jobs: Sequence[Job], ask_heads: Callable[[], HeadLogits]
    ) -> list[TokenTree]:
        return self.select_batch(*top_candidates_torch(ask_heads()), jobs)


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The compiled selection where it can be compiled, else the Python one (the reason is
    logged); `device` and `dtype` are those of the logits."""
    if not native.is_available():
        return PythonBackend()
    return NativeBackend(native.reads(device, dtype))
