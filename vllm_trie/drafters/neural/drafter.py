"""Chains of a trained drafter as trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest
from vllm_trie.drafters.neural.options import NeuralOptions
from vllm_trie.tree import ROOT, TokenTree


class Chains(NamedTuple):
    """What a trained drafter says after each token of its chains, for some requests.

    Both are [requests, K, W]: W different tokens at each of K depths, the likeliest first. The
    first ones are the chain; each depth is given the chain above it.
    """

    token_ids: np.ndarray
    """int32; negative where the request gets no draft."""
    probabilities: np.ndarray
    """float32, of the token given the chain above it."""


class ChainSource(Protocol):
    """The drafter's model."""

    def draft(self, request_ids: Sequence[str]) -> Chains:
        """Draft a chain for each request; all of them are in the running batch."""


class NeuralDrafter(Drafter):
    """Turns chains into trees: the chain, and at each depth alternatives as leaves.

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
    """Return one request's part of :class:`Chains`, both [K, W], as a tree within its limits.

    Alternatives come last, so that the chain is the first child everywhere.
    """
    depth = min(len(token_ids), request.max_depth, request.max_nodes)
    if depth < 1 or token_ids[0, 0] < 0:
        return TokenTree.empty()
    above = np.concatenate(([1.0], np.cumprod(probabilities[:depth, 0])))
    tokens = token_ids[:depth, 0].tolist()
    parents = list(range(ROOT, depth - 1))
    paths = above[1:].tolist()
    if not request.chain_only:
        for level in range(depth):
            for token, probability in zip(
                token_ids[level, 1:], probabilities[level, 1:], strict=True
            ):
                tokens.append(int(token))
                parents.append(level - 1)
                paths.append(float(above[level] * probability))
    kept = request.max_nodes
    return TokenTree.from_lists(tokens[:kept], parents[:kept], paths[:kept])
