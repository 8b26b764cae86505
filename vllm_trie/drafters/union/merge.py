"""Merging: the parts' trees become one trie, and its likeliest nodes the tree to verify."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_trie.drafters.base import VerifiedStep
from vllm_trie.tree import ROOT, TokenTree, depth_first_order, is_prefix

# For parts without probabilities: each further sibling is half as likely as the one before.
_SIBLING_FACTOR = 0.5


@dataclass(slots=True)
class MergedTrie:
    """Nodes of several trees, each distinct prefix once, parents before children.

    Attributes:
        token_ids, parents: Of the merged nodes.
        edges: For each node, the probability of its token given its parent, by the parts that
            propose the node.
        node_of: The merged node of each node of each part's tree.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    edges: list[dict[int, float]] = field(default_factory=list)
    node_of: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def true_path(self, continuation: Sequence[int]) -> list[int]:
        """Return the nodes that a text goes through, root first."""
        path: list[int] = []
        node = ROOT
        for child, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if len(path) == len(continuation):
                break
            if parent == node and token == continuation[len(path)]:
                path.append(child)
                node = child
        return path


class Graft(NamedTuple):
    """Candidates of a part after tokens that another part proposes."""

    part: int
    path: Sequence[int]
    """The tokens, from the root; nodes of another part."""
    tree: TokenTree


def merge(trees: Mapping[int, TokenTree], grafts: Sequence[Graft] = ()) -> MergedTrie:
    """Merge the nodes of several trees.

    Args:
        trees: Of each part that drafted.
        grafts: More candidates of these parts, below nodes of `trees`.
    """
    merged = MergedTrie()
    child_of: dict[tuple[int, int], int] = {}
    for part, tree in trees.items():
        merged.node_of[part] = _add(merged, child_of, part, tree, ROOT)
    for part, path, tree in grafts:
        base = ROOT
        for token in path:
            base = child_of[base, token]
        _add(merged, child_of, part, tree, base)
    if grafts:
        # The order of the parts names the regression that calibrates a node.
        merged.edges = [dict(sorted(edges.items())) for edges in merged.edges]
    return merged


def _add(
    merged: MergedTrie,
    child_of: dict[tuple[int, int], int],
    part: int,
    tree: TokenTree,
    base: int,
) -> list[int]:
    """Add a part's tree below a merged node; returns the merged node of each of its nodes."""
    node_of: list[int] = []
    tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
    for token, parent, edge in zip(tokens, parents, edge_probabilities(tree), strict=True):
        above = node_of[parent] if parent >= 0 else base
        target = child_of.get((above, token))
        if target is None:
            target = child_of[above, token] = merged.num_nodes
            merged.token_ids.append(token)
            merged.parents.append(above)
            merged.edges.append({})
        merged.edges[target].setdefault(part, edge)
        node_of.append(target)
    return node_of


def edge_probabilities(tree: TokenTree) -> list[float]:
    """Return the probability of each node's token given that its parent is accepted."""
    parents = tree.parents.tolist()
    if tree.probabilities is not None:
        paths = tree.probabilities.tolist()
        above = [1.0 if parent < 0 else paths[parent] for parent in parents]
        return [p / a if a > 0 else 0.0 for p, a in zip(paths, above, strict=True)]
    edges = []
    num_siblings: dict[int, int] = {}
    for parent in parents:
        rank = num_siblings[parent] = num_siblings.get(parent, 0) + 1
        edges.append(_SIBLING_FACTOR**rank)
    return edges


@dataclass(slots=True)
class Draft:
    """A step's candidates, including those that do not fit into the tree.

    Attributes:
        merged: The candidates.
        probabilities: Predicted probability that each merged node is accepted.
        parts: Those that drafted.
        max_nodes: Node limit of the step's tree.
        num_tokens: Length of the text when the draft was made.
        order: Merged nodes, the likeliest first; parents come before children.
    """

    merged: MergedTrie
    probabilities: list[float]
    parts: Collection[int]
    max_nodes: int
    num_tokens: int
    order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        negative = [-p for p in self.probabilities]
        self.order = sorted(range(len(negative)), key=negative.__getitem__)

    def selected(self) -> list[int]:
        """Return the likeliest merged nodes that fit, parents before children."""
        return sorted(self.order[: self.max_nodes])

    def parts_of(self, tree: TokenTree) -> list[int]:
        """Return a bit mask for each node of the step's tree, or of a part of it: the parts that
        proposed the node; none did for nodes of a prediction."""
        merged = self.merged
        edges = zip(merged.parents, merged.token_ids, strict=True)
        node_at: dict[tuple[int | None, int], int] = {edge: node for node, edge in enumerate(edges)}
        nodes: list[int | None] = []  # merged ones
        for token, parent in zip(tree.token_list, tree.parent_list, strict=True):
            nodes.append(node_at.get((ROOT if parent < 0 else nodes[parent], token)))
        return [
            0 if node is None else sum(1 << part for part in merged.edges[node]) for node in nodes
        ]


@dataclass(slots=True)
class UnionTree:
    """The tree of a step and where the parts' nodes are in it.

    Attributes:
        tree: Candidates, depth-first with the likeliest child first.
        part_trees: The tree of each part that drafted.
        node_of: The node of `tree` for each node of each part's tree; -1 if it did not fit.
    """

    tree: TokenTree
    part_trees: Mapping[int, TokenTree]
    node_of: dict[int, list[int]]

    def step_of_part(self, step: VerifiedStep | None, part: int) -> VerifiedStep | None:
        """Translate the result of a verification into a part's own nodes.

        The argmax after nodes that were not verified is -1. Returns None if the part did not draft
        or another tree was verified.
        """
        tree = self.part_trees.get(part)
        if step is None or tree is None or not is_prefix(step.tree, self.tree):
            return None
        node_of = self.node_of[part]
        was_accepted = set(step.accepted)
        accepted = tuple(node for node, target in enumerate(node_of) if target in was_accepted)
        argmax = None
        if step.node_argmax is not None:
            of_union = step.node_argmax
            argmax = np.full(tree.num_nodes + 1, -1, dtype=np.int32)
            argmax[0] = of_union[0]
            for node, target in enumerate(node_of):
                if 0 <= target < len(of_union) - 1:
                    argmax[node + 1] = of_union[target + 1]
        return VerifiedStep(tree, accepted, argmax)


def build_tree(draft: Draft, trees: Mapping[int, TokenTree], chain_only: bool = False) -> UnionTree:
    """Lay out the likeliest candidates that fit; of a chain only the path with the most expected
    tokens. `draft` holds the merged candidates of `trees`, by part."""
    merged = draft.merged
    nodes = best_chain(draft) if chain_only else _depth_first(draft)
    place = {node: index for index, node in enumerate(nodes)}
    parents = [place.get(merged.parents[node], ROOT) for node in nodes]
    token_ids = [merged.token_ids[node] for node in nodes]
    probabilities = [draft.probabilities[node] for node in nodes]
    node_of = {part: [place.get(n, -1) for n in of] for part, of in merged.node_of.items()}
    if not token_ids:
        return UnionTree(TokenTree.empty(), trees, node_of)
    return UnionTree(TokenTree.from_lists(token_ids, parents, probabilities), trees, node_of)


def best_chain(draft: Draft) -> list[int]:
    """Return the merged nodes of the path, cut to the node limit, that promises the most tokens:
    the sum of its nodes' probabilities."""
    merged = draft.merged
    depth: list[int] = []
    promised: list[float] = []
    for node, parent in enumerate(merged.parents):
        depth.append(1 if parent < 0 else depth[parent] + 1)
        above = 0.0 if parent < 0 else promised[parent]
        promised.append(above + draft.probabilities[node])
    fitting = [node for node in range(merged.num_nodes) if depth[node] <= draft.max_nodes]
    if not fitting:
        return []
    path = [max(fitting, key=lambda node: (promised[node], -node))]
    while (parent := merged.parents[path[-1]]) >= 0:
        path.append(parent)
    return path[::-1]


def _depth_first(draft: Draft) -> list[int]:
    """Return the selected merged nodes in the order of the tree."""
    merged, nodes = draft.merged, draft.selected()
    index = {node: i for i, node in enumerate(nodes)}
    tree = TokenTree.from_lists(
        [merged.token_ids[node] for node in nodes],
        [index.get(merged.parents[node], ROOT) for node in nodes],
        [draft.probabilities[node] for node in nodes],
    )
    return [nodes[old] for old in depth_first_order(tree).tolist()]
