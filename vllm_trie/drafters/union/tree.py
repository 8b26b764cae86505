"""From merged candidates to the tree that is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_trie.drafters.union.hindsight import Draft
from vllm_trie.tree import ROOT, TokenTree, depth_first_order


@dataclass(slots=True)
class UnionTree:
    """A tree and where the parts' nodes are in it.

    Attributes:
        tree: candidates first, depth-first with the likeliest child first, then the nodes that are
            never accepted, part by part.
        node_of: for each part the tree's node of each of its own, -1 for those left out.
    """

    tree: TokenTree
    node_of: list[list[int]]

    def as_chain(self) -> UnionTree:
        """Its likeliest path."""
        chain = self.tree.chain()
        size = chain.num_nodes
        if chain.never_accept is not None:
            chain = TokenTree(chain.token_ids, chain.parents, chain.probabilities)
        return UnionTree(
            chain, [[node if node < size else -1 for node in nodes] for nodes in self.node_of]
        )

    def was_scheduled_as(self, scheduled: TokenTree) -> bool:
        """Whether `scheduled` is this tree or a prefix of it."""
        if scheduled is self.tree:
            return True
        size = scheduled.num_nodes
        return np.array_equal(scheduled.token_ids, self.tree.token_ids[:size]) and np.array_equal(
            scheduled.parents, self.tree.parents[:size]
        )


def build_tree(draft: Draft, trees: Sequence[TokenTree]) -> UnionTree:
    """The likeliest candidates that fit beside the parts' nodes that are never accepted.

    Args:
        draft: the merged candidates of `trees`.
        trees: one for each part, empty for parts that did not draft.
    """
    merged = draft.merged
    selected = draft.selected()
    index = {node: i for i, node in enumerate(selected)}
    candidates = TokenTree.from_lists(
        [merged.token_ids[node] for node in selected],
        [index.get(merged.parents[node], ROOT) for node in selected],
        [draft.probabilities[node] for node in selected],
    )
    order = depth_first_order(candidates).tolist()
    place = {selected[old]: new for new, old in enumerate(order)}
    token_ids = [merged.token_ids[selected[old]] for old in order]
    parents = [place.get(merged.parents[selected[old]], ROOT) for old in order]
    probabilities = [draft.probabilities[selected[old]] for old in order]
    num_candidates = len(order)

    node_of: list[list[int]] = []
    for part, tree in enumerate(trees):
        targets = [place.get(node, -1) for node in merged.node_of[part]]
        if tree.never_accept is not None and draft.overhead.get(part, 0) > 0:
            for node in np.flatnonzero(tree.never_accept).tolist():
                parent = int(tree.parents[node])
                above = ROOT if parent < 0 else targets[parent]
                if parent >= 0 and above < 0:
                    continue  # what it hangs under did not fit
                targets[node] = len(token_ids)
                token_ids.append(int(tree.token_ids[node]))
                parents.append(above)
                probabilities.append(0.0)
        node_of.append(targets)
    built = TokenTree.from_lists(token_ids, parents, probabilities)
    if len(token_ids) > num_candidates:
        never = np.arange(len(token_ids)) >= num_candidates
        built = TokenTree(built.token_ids, built.parents, built.probabilities, never)
    return UnionTree(built if token_ids else TokenTree.empty(), node_of)
