"""Business rules: the part of a catalogue that one request may generate.

An item is valid if an allow-list has it, or there is none, and no deny-list has it. A node may be
entered if a valid item ends at it or below, so no hypothesis reaches a dead end.

Rules are few and tries large, so nothing of a trie's size is made. Nodes on the paths to what the
rules name have a line each in a table. Any other node is wholly inside or wholly outside of each
named subtree. The descendants of a node are consecutive at each level; named subtrees are therefore
intervals of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vllm_trie.extras.items.trie import ROOT, Children, ItemId, ItemTrie


class Rules(NamedTuple):
    """The items that a request allows and denies; unknown ones match nothing.

    Attributes:
        allow_items: Ids; None together with `allow_prefixes`: all items.
        allow_prefixes: Beginnings of items.
        deny_items: Ids.
        deny_prefixes: Beginnings of items.
    """

    allow_items: Sequence[ItemId] | None = None
    allow_prefixes: Sequence[Sequence[int]] | None = None
    deny_items: Sequence[ItemId] = ()
    deny_prefixes: Sequence[Sequence[int]] = ()

    @property
    def restrict(self) -> bool:
        """Whether anything is not allowed."""
        given = self.allow_items is not None or self.allow_prefixes is not None
        return given or bool(self.deny_items or self.deny_prefixes)


class ValidPart(NamedTuple):
    """The valid part of a trie.

    Attributes:
        bounds: int64 [2 * k], ascending; nodes in ``bounds[0] .. bounds[1]`` and so on are valid
            with all that is below them, unless `nodes` has them.
        nodes: int32 [m], ascending; nodes at or above something that the rules name, those alone
            that a search looks at.
        ends: bool [m], whether an item that ends at the node is valid.
        continues: bool [m], whether there are valid items below the node.
    """

    bounds: np.ndarray
    nodes: np.ndarray
    ends: np.ndarray
    continues: np.ndarray


class SelectedTrie:
    """The view of a trie's valid part, with the methods that a search needs."""

    def __init__(self, trie: ItemTrie, valid_part: ValidPart) -> None:
        self.trie = trie
        self.valid_part = valid_part
        self.tokens = trie.tokens
        self.weight_range = trie.weight_range

    def children(self, nodes: np.ndarray) -> Children:
        """Return the children of int [n] nodes that may be entered."""
        children = self.trie.children(nodes)
        ends, continues = self._lookup(children.nodes)
        kept = ends | continues
        return children if kept.all() else Children(*(array[kept] for array in children))

    def has_children(self, nodes: np.ndarray) -> np.ndarray:
        """Return bool[...], whether valid items go on after int[...] nodes."""
        return np.asarray(self._lookup(nodes)[1] & self.trie.has_children(nodes))

    def is_terminal(self, nodes: np.ndarray) -> np.ndarray:
        """Return bool[...], whether a valid item ends at int[...] nodes."""
        return np.asarray(self._lookup(nodes)[0] & self.trie.is_terminal(nodes))

    def item_weights(self, nodes: np.ndarray) -> np.ndarray:
        """Return float32[...], the weights of the items that end at int[...] nodes."""
        return self.trie.item_weights(nodes)

    def _lookup(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return bool[...] twice: items may end at the nodes, or below, if the trie has them."""
        part = self.valid_part
        inside = np.searchsorted(part.bounds, nodes, side="right") % 2 == 1
        ends, continues = inside, inside.copy()
        if len(part.nodes):
            sought = np.asarray(nodes, dtype=part.nodes.dtype)
            indices = np.minimum(np.searchsorted(part.nodes, sought), len(part.nodes) - 1)
            listed = part.nodes[indices] == sought
            ends = np.where(listed, part.ends[indices], ends)
            continues = np.where(listed, part.continues[indices], continues)
        return ends, continues


def view(trie: ItemTrie, valid_part: ValidPart | None) -> ItemTrie | SelectedTrie:
    """Return the view of a trie's valid part; None: the trie, all of which is valid."""
    return trie if valid_part is None else SelectedTrie(trie, valid_part)


def select(trie: ItemTrie, rules: Rules) -> ValidPart:
    """Return the valid part of a trie; the work depends on the rules, not on the trie's size."""
    everything = rules.allow_items is None and rules.allow_prefixes is None
    allowed = trie.find_ids(rules.allow_items or ())
    allowed_tops = trie.find_all([()] if everything else rules.allow_prefixes or ())
    denied = trie.find_ids(rules.deny_items)
    denied_tops = trie.find_all(rules.deny_prefixes)

    nodes, parents = _with_ancestors(trie, [allowed, allowed_tops, denied, denied_tops])
    in_allowed, in_denied = np.isin(nodes, allowed_tops), np.isin(nodes, denied_tops)
    levels = _levels(trie, nodes)
    for level in levels[1:]:
        in_allowed[level] |= in_allowed[parents[level]]
        in_denied[level] |= in_denied[parents[level]]
    ends = (in_allowed | np.isin(nodes, allowed)) & ~in_denied & ~np.isin(nodes, denied)
    ends &= trie.is_terminal(nodes)
    # A child that is not among the nodes has nothing named below it: it is as its parent is.
    num_children = trie.first_child[nodes + 1] - trie.first_child[nodes]
    others = num_children > np.bincount(parents[1:], minlength=len(nodes))
    continues = in_allowed & ~in_denied & others
    for level in levels[:0:-1]:
        live = (ends | continues)[level]
        continues[parents[level][live]] = True
    seen = (ends | continues)[parents] | (parents == 0)  # no search comes to the others
    bounds = _bounds(trie, allowed_tops, denied_tops)
    return ValidPart(bounds, nodes[seen], ends[seen], continues[seen])


def _with_ancestors(trie: ItemTrie, named: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the root, nodes and all their ancestors, ascending, and the indices of their parents.

    The root's parent is the root.
    """
    levels = [np.unique(np.concatenate([*named, [ROOT]])).astype(np.int32)]
    while len(below := levels[-1][levels[-1] != ROOT]):
        levels.append(np.unique(trie.parents(below)))
    nodes = np.unique(np.concatenate(levels))
    parents = np.zeros(len(nodes), dtype=np.int64)
    parents[1:] = np.searchsorted(nodes, trie.parents(nodes[1:]))
    return nodes, parents


def _levels(trie: ItemTrie, nodes: np.ndarray) -> list[slice]:
    """Return the slices of ascending nodes that have depth 0, 1, and so on."""
    bounds, start = [0, 1], 1
    while bounds[-1] < len(nodes):
        start = int(trie.first_child[start])  # of the next level
        bounds.append(int(np.searchsorted(nodes, start)))
    return [slice(*pair) for pair in pairwise(bounds)]


def _bounds(trie: ItemTrie, allowed: np.ndarray, denied: np.ndarray) -> np.ndarray:
    """Return the intervals of nodes in the subtrees of `allowed` and not in those of `denied`."""
    every, changes = [], []
    for kind, tops in enumerate((allowed, denied)):
        low, high = tops.astype(np.int64), tops.astype(np.int64) + 1
        while len(low):
            every += [low, high]
            for change in (1, -1):
                changes.append(np.zeros((len(low), 2), dtype=np.int64))
                changes[-1][:, kind] = change
            low, high = trie.first_child[low].astype(np.int64), trie.first_child[high]
            low, high = low[low < high], high[low < high].astype(np.int64)
    if not every:
        return np.empty(0, dtype=np.int64)
    points, indices = np.unique(np.concatenate(every), return_inverse=True)
    depth = np.zeros((len(points), 2), dtype=np.int64)
    np.add.at(depth, indices, np.concatenate(changes))
    depth = depth.cumsum(axis=0)
    inside = (depth[:, 0] > 0) & (depth[:, 1] == 0)
    return np.asarray(points[np.diff(inside, prepend=False)])
