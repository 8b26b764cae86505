"""The verification branch: candidates as a trie."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafters.lookahead.pool import CONTEXT_LEN, Candidate
from vllm_trie.tree import ROOT, TokenTree, depth_first_layout

# How often a candidate is right where those before it do not say so already, measured on the
# shipped model (docs/lookahead.md). First tokens by rank, where the best one and this one share
# with the text before them the whole context, ...
_FULL_CONTEXT = (0.85, 0.45)
_PART_OF_CONTEXT = (0.55, 0.35)
"""... a part of it, as long as the best one's, ..."""
_NO_CONTEXT = (0.27, 0.16, 0.1, 0.07, 0.05)
"""... or nothing at all."""
# First tokens with a shorter common context than the best one's, by the length of the best one's.
_BESIDE_LONGER_CONTEXT = (0.0, 0.07, 0.015, 0.012)
# Next tokens by the length of the common context and the number of right tokens before them.
_CONTINUED = ((0.6, 0.7, 0.75), (0.75, 0.85, 0.9), (0.8, 0.85, 0.9), (0.9, 0.92, 0.95))


def candidate_trie(
    candidates: Sequence[Candidate], max_nodes: int, max_depth: int, min_probability: float = 0.0
) -> TokenTree:
    """Merge candidates, the best first, into a trie of the likeliest nodes.

    A common prefix is verified once, and is as likely as one of its candidates being right there.
    Laid out depth-first, the likeliest child first.

    Args:
        candidates: as `NgramPool.after` gives them.
        max_nodes: B, the least likely nodes beyond it are dropped.
        max_depth: D.
        min_probability: nodes that are less likely are dropped.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    wrong: list[float] = []
    """Probability that no candidate through the node is right up to it."""
    child_of: dict[tuple[int, int], int] = {}
    for rank, candidate in enumerate(candidates):
        node, share = ROOT, first_token_probability(rank, candidate, candidates[0])
        for depth, token in enumerate(candidate.tokens[:max_depth]):
            if depth > 0:
                share *= _at(_CONTINUED[candidate.num_matched], depth - 1)
            child = child_of.get((node, token))
            if child is None:
                child = child_of[node, token] = len(token_ids)
                token_ids.append(token)
                parents.append(node)
                wrong.append(1.0)
            wrong[child] *= 1.0 - share
            node = child
    kept = sorted(range(len(wrong)), key=lambda node: (wrong[node], node))[: max(max_nodes, 0)]
    kept = sorted(node for node in kept if 1.0 - wrong[node] >= min_probability)
    if not kept:
        return TokenTree.empty()
    new_index = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
    tree = TokenTree.from_lists(
        [token_ids[node] for node in kept],
        [new_index[parents[node]] for node in kept],
        [1.0 - wrong[node] for node in kept],
    )
    return depth_first_layout(tree)


def first_token_probability(rank: int, candidate: Candidate, best: Candidate) -> float:
    """Probability that a candidate's first token is right and no better candidate says so."""
    if candidate.num_matched < best.num_matched:
        return _BESIDE_LONGER_CONTEXT[best.num_matched]
    if candidate.num_matched == CONTEXT_LEN:
        return _at(_FULL_CONTEXT, rank)
    return _at(_PART_OF_CONTEXT if candidate.num_matched else _NO_CONTEXT, rank)


def _at(values: Sequence[float], index: int) -> float:
    """A value, the last one beyond the end."""
    return values[min(index, len(values) - 1)]
