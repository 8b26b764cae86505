"""Blended back-off in readable Python: the twin of core/draft.cpp, and what runs without it.

The probability of the next token blends contexts of every length, in every source, the longest
first: with n successors counted after a context, u of them distinct, successor t of count c gets
(c - d) / (n + theta) of the probability that is left, and (theta + d·u) / (n + theta) is passed on
to the next shorter context. This is the predictive rule of the hierarchical Pitman-Yor process with
one table a type, that is, interpolated Kneser-Ney smoothing.

Source: Teh, "A hierarchical Bayesian language model based on Pitman-Yor processes" (2006), eq. 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from vllm_trie.drafters.ngram_trie.constants import (
    CUT_LEFT,
    CUT_SHARE,
    MIN_LEFT,
    OWN,
    PATH_TRUST,
    SHARED,
    Source,
)
from vllm_trie.drafters.ngram_trie.contexts import (
    Counted,
    Match,
    advance,
    count_successors,
    match_suffix,
)
from vllm_trie.drafters.ngram_trie.index import NgramIndex
from vllm_trie.tree import ROOT, TokenTree, depth_first_layout


class LongestMatch(NamedTuple):
    """The longest known suffix of the text in one source."""

    length: int
    text: int
    """The source's text in which it occurred last."""


class BlendedDraft(NamedTuple):
    """A drafted tree."""

    tree: TokenTree
    matches: list[LongestMatch]
    """One a source."""


class Blend:
    """The scoring with its parameters; benchmarks/_replay_variants.py tries others."""

    own: Source = OWN
    shared: Source = SHARED
    path_trust: float = PATH_TRUST

    def draft(
        self,
        indexes: Sequence[NgramIndex],
        token_ids: Sequence[int],
        max_nodes: int,
        max_depth: int,
        chain_only: bool,
        min_probability: float = 0.0,
    ) -> BlendedDraft:
        """The tree of the `max_nodes` likeliest continuations of `token_ids`.

        Args:
            indexes: sources in the order in which they are believed; the first is the request's
                own text, the others are shared.
            token_ids: the text that is continued.
            max_nodes, max_depth, chain_only: limits of the tree.
            min_probability: of a node's path; what is less likely is left out.
        """
        sources = [(index, self.shared if i else self.own) for i, index in enumerate(indexes)]
        start = [self.match_suffix(index, token_ids) for index in indexes]
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        # (-probability, order of discovery, token, parent, depth, contexts of the parent)
        heap: list[tuple[float, int, int, int, int, list[list[Match]]]] = []
        discovered = 0
        # The largest probabilities discovered so far: what is behind max_nodes others is not
        # chosen.
        best: list[float] = []

        def discover(contexts: list[list[Match]], above: float, parent: int, depth: int) -> None:
            nonlocal discovered
            bound = max(best[0], min_probability) if len(best) == max_nodes else min_probability
            cut = bound / above
            for token, share in self.predict(sources, contexts, cut).items():
                probability = share
                if depth > 1:
                    probability *= (1.0 + self.path_trust) / (1.0 + self.path_trust * share)
                guess = above * probability
                if guess <= 0.0 or guess < min_probability:  # the former is too small for a float
                    continue
                heapq.heappush(heap, (-guess, discovered, token, parent, depth, contexts))
                discovered += 1
                if len(best) < max_nodes:
                    heapq.heappush(best, guess)
                else:
                    heapq.heappushpop(best, guess)

        discover(start, 1.0, ROOT, 1)
        while heap and len(tokens) < max_nodes:
            negative, _, token, parent, depth, contexts = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(min(-negative, 1.0))
            if chain_only:
                heap.clear()
                best.clear()
            if depth < max_depth:
                longer = [
                    self.advance(index, known, token)
                    for index, known in zip(indexes, contexts, strict=True)
                ]
                discover(longer, -negative, len(tokens) - 1, depth + 1)
        tree = TokenTree.from_lists(tokens, parents, probabilities)
        return BlendedDraft(
            depth_first_layout(tree) if tokens else TokenTree.empty(),
            [LongestMatch(len(known) - 1, known[-1].text) for known in start],
        )

    def match_suffix(self, index: NgramIndex, token_ids: Sequence[int]) -> list[Match]:
        """The contexts at the end of a text."""
        return match_suffix(index, token_ids)

    def advance(self, index: NgramIndex, contexts: list[Match], token: int) -> list[Match]:
        """The contexts that end one token later."""
        return advance(index, contexts, token)

    def predict(
        self,
        sources: Sequence[tuple[NgramIndex, Source]],
        contexts: Sequence[list[Match]],
        cut: float,
    ) -> dict[int, float]:
        """Probability of each likely next token, in the order in which they were met.

        What cannot come up to `cut` may be left out.
        """
        successors: dict[int, float] = {}
        left = 1.0
        for order in range(max(len(known) for known in contexts) - 1, -1, -1):
            if left < max(MIN_LEFT, CUT_LEFT * cut):
                break
            for (index, source), known in zip(sources, contexts, strict=True):
                if order < len(known):
                    counted = count_successors(index, known[order])
                    left = give_shares(counted, source, left, cut, successors)
        return successors


def give_shares(
    counted: Counted, source: Source, left: float, cut: float, successors: dict[int, float]
) -> float:
    """Add a context's share of the probability `left` to `successors`; returns what remains."""
    if counted.num_successors == 0:
        return left
    total = counted.num_types + source.concentration
    for token, types in counted.likeliest:
        share = left * (types - source.discount) / total
        if share < CUT_SHARE * cut:
            break
        successors[token] = successors.get(token, 0.0) + share
    return left * (source.concentration + source.discount * counted.num_successors) / total
