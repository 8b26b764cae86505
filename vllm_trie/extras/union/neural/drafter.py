"""Chains of a trained drafter as trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafts.drafter import Drafter, DrafterContext, DraftRequest
from vllm_trie.extras.union.neural.options import NeuralOptions
from vllm_trie.tree import ROOT, TokenTree


class Chains(NamedTuple):
    """The chains of a trained drafter for some requests, both [requests, K]."""

    token_ids: np.ndarray
    """int32."""
    probabilities: np.ndarray
    """float32, of the token given the chain before it."""


class ChainSource(Protocol):
    """The drafter's model."""

    def draft(self, request_ids: Sequence[str]) -> Chains:
        """Draft a chain for each request; all of them are in the running batch."""


class NeuralDrafter(Drafter):
    """A trained drafter's chains as trees.

    Not a method of its own: the engine has to load the drafter's weights and give it a KV cache,
    which vLLM does for its own methods.

    Attributes:
        source: The drafter's model, set where it is loaded.
    """

    name: ClassVar[str] = "neural"
    Options: ClassVar[type[BaseModel]] = NeuralOptions

    def __init__(self, options: NeuralOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.source: ChainSource | None = None

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        if self.source is None:
            raise RuntimeError(f"the weights of {self.options.method!r} are not loaded")
        chains = self.source.draft([request.request_id for request in requests])
        return [
            chain_tree(request, tokens, probabilities)
            for request, tokens, probabilities in zip(requests, *chains, strict=True)
        ]


def chain_tree(
    request: DraftRequest, token_ids: np.ndarray, probabilities: np.ndarray
) -> TokenTree:
    """Return one request's part of :class:`Chains`, both [K], as a tree within its limits."""
    depth = min(len(token_ids), request.max_depth, request.max_nodes)
    if depth < 1:
        return TokenTree.empty()
    paths = np.cumprod(probabilities[:depth]).tolist()
    return TokenTree.from_lists(token_ids[:depth].tolist(), list(range(ROOT, depth - 1)), paths)
