"""The verification branch: candidates as a trie."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.tree import ROOT, TokenTree, depth_first_layout

# A candidate counts half as much as the next newer one, and every further token is accepted with
# this probability. Rough, but only their order matters here; a union calibrates them.
RECENCY = 0.5
CONTINUE = 0.75


def candidate_trie(
    candidates: Sequence[Sequence[int]], max_nodes: int, max_depth: int
) -> TokenTree:
    """Merge candidates, the newest first, into a trie with path probabilities.

    Candidates that do not fit any more are cut, the older ones first. Laid out depth-first, the
    likeliest child first.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    child_of: dict[tuple[int, int], int] = {}
    weight = 1.0
    for candidate in candidates:
        weight *= RECENCY
        node, share = ROOT, weight
        for token in candidate[:max_depth]:
            child = child_of.get((node, token))
            if child is None:
                if len(token_ids) >= max_nodes:
                    break
                child = child_of[node, token] = len(token_ids)
                token_ids.append(token)
                parents.append(node)
                probabilities.append(0.0)
            probabilities[child] += share
            node, share = child, share * CONTINUE
    if not token_ids:
        return TokenTree.empty()
    return depth_first_layout(TokenTree.from_lists(token_ids, parents, probabilities))
