"""Drafters of the lookahead benchmark: candidates as a trie, or each in a branch of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_trie.drafts import DraftRequest
from vllm_trie.extras.lookahead import LookaheadDrafter
from vllm_trie.extras.lookahead.candidates import CandidateTrie
from vllm_trie.extras.lookahead.pool import Candidate
from vllm_trie.tree import ROOT, TokenTree


class CountedLookahead(LookaheadDrafter):
    """Lookahead that counts the nodes of each request's last tree that verify candidates."""

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.verification_nodes: dict[str, int] = {}

    def verification_branch(
        self, request: DraftRequest, trie: CandidateTrie, max_nodes: int
    ) -> TokenTree:
        branch = self.branch(trie, super().verification_branch(request, trie, max_nodes))
        self.verification_nodes[request.request_id] = branch.num_nodes
        return branch

    def branch(self, trie: CandidateTrie, merged: TokenTree) -> TokenTree:
        """Return the tree to verify, given the method's own."""
        return merged

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        super().released(request, output)
        self.verification_nodes.pop(request.request_id, None)


class IndependentLookahead(CountedLookahead):
    """Lookahead with each candidate in a branch of its own, as LADE verifies them.

    Prefixes that a candidate shares with earlier ones are computed again, in nodes that are never
    accepted because the first of the equal nodes is. Both drafters accept the same tokens.
    """

    def branch(self, trie: CandidateTrie, merged: TokenTree) -> TokenTree:
        return repeat_shared_prefixes(merged, trie.candidates, trie.max_depth)


def repeat_shared_prefixes(
    trie: TokenTree, candidates: Sequence[Candidate], max_depth: int
) -> TokenTree:
    """Return the trie followed by a branch for every prefix that a candidate shares with others.

    The result has a node for each token of the candidates up to `max_depth`.
    """
    tokens, parents = trie.token_ids.tolist(), trie.parents.tolist()
    child_of = {(p, t): node for node, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    seen: set[int] = set()
    for candidate in candidates:
        node = above = ROOT
        for token in candidate.tokens[:max_depth]:
            node = child_of[node, token]
            if node in seen:
                parents.append(above)
                above = len(tokens)
                tokens.append(token)
            seen.add(node)
    built = TokenTree.from_lists(tokens, parents)
    probabilities = np.zeros(len(tokens), dtype=np.float32)
    if trie.probabilities is not None:
        probabilities[: trie.num_nodes] = trie.probabilities
    never_accept = np.arange(len(tokens)) >= trie.num_nodes
    return TokenTree(built.token_ids, built.parents, probabilities, never_accept)
