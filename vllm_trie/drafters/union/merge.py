"""Several trees of one request merged into one trie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_trie.tree import ROOT, TokenTree

# A part without probabilities: each further sibling half as likely as the one before.
_UNKNOWN = 0.5


@dataclass(slots=True)
class MergedTrie:
    """Nodes of several trees, each distinct prefix once, parents before children.

    Attributes:
        token_ids, parents: of the merged nodes.
        edges: for each node the probability of its last token given its parent, by part; parts that
            do not have the node are left out.
        node_of: for each part the merged node of each of its nodes, -1 for nodes that must never be
            accepted (they are not merged).
    """

    token_ids: list[int]
    parents: list[int]
    edges: list[dict[int, float]]
    node_of: list[list[int]]

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def true_path(self, continuation: Sequence[int]) -> list[int]:
        """The nodes that a text goes through, root first."""
        path: list[int] = []
        node = ROOT
        for child, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if (
                parent == node
                and len(path) < len(continuation)
                and token == continuation[len(path)]
            ):
                path.append(child)
                node = child
        return path


def merge(trees: Sequence[TokenTree]) -> MergedTrie:
    """Merge the nodes that may be accepted; one tree for each part, in the parts' order."""
    merged = MergedTrie([], [], [], [])
    child_of: dict[tuple[int, int], int] = {}
    for part, tree in enumerate(trees):
        node_of: list[int] = []
        edges = edge_probabilities(tree)
        never = (
            [False] * tree.num_nodes if tree.never_accept is None else tree.never_accept.tolist()
        )
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = node_of[parent] if parent >= 0 else ROOT
            if never[node] or (parent >= 0 and above < 0):
                node_of.append(-1)
                continue
            target = child_of.get((above, token))
            if target is None:
                target = child_of[above, token] = merged.num_nodes
                merged.token_ids.append(token)
                merged.parents.append(above)
                merged.edges.append({})
            merged.edges[target][part] = edges[node]
            node_of.append(target)
        merged.node_of.append(node_of)
    return merged


def edge_probabilities(tree: TokenTree) -> list[float]:
    """Probability of each node's token given that its parent is accepted."""
    parents = tree.parents.tolist()
    if tree.probabilities is not None:
        paths = tree.probabilities.tolist()
        above = [1.0 if parent < 0 else paths[parent] for parent in parents]
        return [p / a if a > 0 else 0.0 for p, a in zip(paths, above, strict=True)]
    edges = []
    num_siblings: dict[int, int] = {}
    for parent in parents:
        rank = num_siblings[parent] = num_siblings.get(parent, 0) + 1
        edges.append(_UNKNOWN**rank)
    return edges
