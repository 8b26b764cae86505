"""The verification branch: candidates as a trie."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.extras.lookahead.pool import Candidate
from vllm_trie.extras.lookahead.rates import acceptance_rate
from vllm_trie.tree import ROOT, TokenTree, depth_first_layout


class CandidateTrie:
    """All candidates of a step, each common prefix once.

    A node belongs to the class of the best candidate that goes through it. Its probability is that
    of its whole path.

    Args:
        candidates: The best first, as `NgramPool.after` returns them.
        max_depth: D, depth limit.

    Attributes:
        token_ids, parents, probabilities: Of the nodes, parents before children and better
            candidates' nodes first.
    """

    __slots__ = ("candidates", "max_depth", "parents", "probabilities", "token_ids")

    def __init__(self, candidates: Sequence[Candidate], max_depth: int) -> None:
        self.candidates = candidates
        self.max_depth = max_depth
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.probabilities: list[float] = []
        child_of: dict[tuple[int, int], int] = {}
        num_children: dict[int, int] = {}
        for candidate in candidates:
            matched = candidate.num_matched
            node, probability = ROOT, 1.0
            for depth, token in enumerate(candidate.tokens[:max_depth]):
                child = child_of.get((node, token))
                if child is None:
                    rank = num_children.get(node, 0)
                    num_children[node] = rank + 1
                    best_matched = candidates[0].num_matched
                    probability *= acceptance_rate(rank, matched, depth, best_matched)
                    child = child_of[node, token] = len(self.token_ids)
                    self.token_ids.append(token)
                    self.parents.append(node)
                    self.probabilities.append(probability)
                else:
                    probability = self.probabilities[child]
                node = child

    def tree(self, max_nodes: int, min_probability: float = 0.0) -> TokenTree:
        """Return the likeliest nodes, depth-first with the likeliest child first.

        Args:
            max_nodes: B, node limit.
            min_probability: Nodes that are less likely are left out.
        """
        probabilities = self.probabilities
        kept = [
            node for node, probability in enumerate(probabilities) if probability >= min_probability
        ]
        if len(kept) > max_nodes:
            likeliest = sorted(kept, key=lambda node: (-probabilities[node], node))
            kept = sorted(likeliest[: max(max_nodes, 0)])
        if not kept:
            return TokenTree.empty()
        new_index = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
        tree = TokenTree.from_lists(
            [self.token_ids[node] for node in kept],
            [new_index[self.parents[node]] for node in kept],
            [probabilities[node] for node in kept],
        )
        return depth_first_layout(tree)
