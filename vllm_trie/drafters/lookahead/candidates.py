"""The verification branch: candidates as a trie."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafters.lookahead.pool import CONTEXT_LEN, Candidate
from vllm_trie.tree import ROOT, TokenTree, depth_first_layout

# Measured on the shipped model (docs/lookahead.md): how often a candidate's first token is right.
_FULL_CONTEXT = 0.9
_BEST = 0.5
_OTHER = 0.28
_BESIDE_FULL_CONTEXT = 0.1
# And how often the next token is, by the number of tokens before it that are.
_CONTINUED = (1.0, 0.75, 0.85, 0.9)


def candidate_trie(candidates: Sequence[Candidate], max_nodes: int, max_depth: int) -> TokenTree:
    """Merge candidates, the best first, into a trie of the likeliest nodes.

    A common prefix is verified once, and is as likely as one of its candidates being right there.
    Laid out depth-first, the likeliest child first.

    Args:
        candidates: as `NgramPool.after` gives them.
        max_nodes: B, the least likely nodes beyond it are dropped.
        max_depth: D.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    wrong: list[float] = []
    """Probability that no candidate through the node is right up to it."""
    child_of: dict[tuple[int, int], int] = {}
    for rank, candidate in enumerate(candidates):
        node, share = ROOT, first_token_probability(rank, candidate, candidates[0])
        for depth, token in enumerate(candidate.tokens[:max_depth]):
            share *= _CONTINUED[min(depth, len(_CONTINUED) - 1)]
            child = child_of.get((node, token))
            if child is None:
                child = child_of[node, token] = len(token_ids)
                token_ids.append(token)
                parents.append(node)
                wrong.append(1.0)
            wrong[child] *= 1.0 - share
            node = child
    if not token_ids or max_nodes <= 0:
        return TokenTree.empty()
    kept = sorted(range(len(wrong)), key=lambda node: (wrong[node], node))[:max_nodes]
    kept.sort()  # parents come before children again
    new_index = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
    tree = TokenTree.from_lists(
        [token_ids[node] for node in kept],
        [new_index[parents[node]] for node in kept],
        [1.0 - wrong[node] for node in kept],
    )
    return depth_first_layout(tree)


def first_token_probability(rank: int, candidate: Candidate, best: Candidate) -> float:
    """Probability that a candidate's first token is right, by its rank and its context."""
    if rank == 0:
        return _FULL_CONTEXT if candidate.num_matched == CONTEXT_LEN else _BEST
    return _BESIDE_FULL_CONTEXT if best.num_matched == CONTEXT_LEN else _OTHER
