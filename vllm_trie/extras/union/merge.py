"""Merging: the parts' trees become one trie, and its likeliest nodes the tree to verify."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_trie.tree import ROOT, TokenTree, depth_first_layout

# For parts without probabilities: each further sibling is half as likely as the one before.
_SIBLING_FACTOR = 0.5


@dataclass(slots=True)
class MergedTrie:
    """Nodes of several trees, each distinct prefix once, parents before children.

    Attributes:
        token_ids, parents: Of the merged nodes.
        edges: For each node, the probability of its token given its parent, by the parts that
            propose the node.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    edges: list[dict[int, float]] = field(default_factory=list)

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
        _add(merged, child_of, part, tree, ROOT)
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
) -> None:
    """Add a part's tree below a merged node."""
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


def build_tree(draft: Draft, chain_only: bool = False) -> TokenTree:
    """Lay out the likeliest candidates that fit, depth-first with the likeliest child first; of a
    chain only the path with the most expected tokens."""
    merged = draft.merged
    nodes = best_chain(draft) if chain_only else draft.selected()
    index = {node: i for i, node in enumerate(nodes)}
    tree = TokenTree.from_lists(
        [merged.token_ids[node] for node in nodes],
        [index.get(merged.parents[node], ROOT) for node in nodes],
        [draft.probabilities[node] for node in nodes],
    )
    return depth_first_layout(tree)


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
