"""The token tree: the one data structure that every drafter fills and every verifier reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

ROOT = -1
"""Parent of the nodes that directly follow the last committed token."""

_WORD_BITS = 64

_Count = TypeVar("_Count", int, np.ndarray)


def words_per_node(num_nodes: _Count) -> _Count:
    """Return how many ancestor words a node of a tree of N nodes has; also for arrays of N."""
    return -(-num_nodes // _WORD_BITS)


class MalformedTreeError(ValueError):
    """A token tree breaks one of the rules that `TokenTree.validate` checks."""


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A trie of draft tokens after the last committed token of one request.

    Nothing in this package writes to the arrays of a tree that it did not create. Parents come
    before children, so any leading part of the arrays is itself a tree. What is derived from the
    arrays is cached at the first access: take a `copy` of a tree whose arrays may change later.

    Attributes:
        token_ids: int32 [N], the token of each node.
        parents: int32 [N], index of each node's parent, `ROOT` (-1) for a child of the last
            committed token; `parents[i] < i`.
        probabilities: float32 [N] or None, the drafter's estimate of the probability that the
            node is accepted (the whole path, not the last edge), so never larger than the parent's.
        never_accept: bool [N] or None, nodes that are verified only for their argmax (the
            lookahead window) and must never be accepted. Siblings are distinct among the others
            only.
    """

    token_ids: np.ndarray
    parents: np.ndarray
    probabilities: np.ndarray | None = None
    never_accept: np.ndarray | None = None

    @classmethod
    def empty(cls) -> TokenTree:
        """Return the tree without nodes: verifying it is a plain decoding step."""
        return _EMPTY

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[int],
        parents: Sequence[int],
        probabilities: Sequence[float] | None = None,
    ) -> TokenTree:
        """Build a tree from plain sequences of equal length, without checking them."""
        return cls(
            np.asarray(token_ids, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            None if probabilities is None else np.asarray(probabilities, dtype=np.float32),
        )

    @classmethod
    def from_paths(cls, sequences: Iterable[Sequence[int]], max_nodes: int) -> TokenTree:
        """Merge token sequences that start after the last committed token into one trie.

        Sequences are inserted in the order given; a common prefix is stored once. Once the trie
        has `max_nodes` nodes, the rest of a sequence that needs a new node is dropped.
        """
        token_ids: list[int] = []
        parents: list[int] = []
        child_of: dict[tuple[int, int], int] = {}
        for sequence in sequences:
            node = ROOT
            for token in sequence:
                edge = (node, int(token))
                child = child_of.get(edge)
                if child is None:
                    if len(token_ids) >= max_nodes:
                        break
                    child = child_of[edge] = len(token_ids)
                    token_ids.append(edge[1])
                    parents.append(node)
                node = child
        return cls.from_lists(token_ids, parents)

    @property
    def num_nodes(self) -> int:
        """N, the number of draft tokens."""
        return len(self.token_ids)

    @cached_property
    def token_list(self) -> list[int]:
        """`token_ids` as a list, for loops in Python."""
        tokens: list[int] = self.token_ids.tolist()
        return tokens

    @cached_property
    def parent_list(self) -> list[int]:
        """`parents` as a list, for loops in Python."""
        parents: list[int] = self.parents.tolist()
        return parents

    @property
    def is_chain(self) -> bool:
        """Whether every node is the only child of the node before it (true for an empty tree)."""
        chain = np.arange(-1, len(self.parents) - 1, dtype=np.int32)
        return self.parents.tobytes() == chain.tobytes()

    def children(self) -> list[list[int]]:
        """Return the children of each node in index order; the last list is the root's."""
        children: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parent_list):
            children[parent].append(node)
        return children

    def depths(self) -> np.ndarray:
        """Return int32 [N], the number of tokens on the path to each node, at least 1.

        The position of a node in its sequence is the number of committed tokens plus depth - 1.
        """
        depths = [0] * self.num_nodes
        for node, parent in enumerate(self.parent_list):
            depths[node] = 1 if parent < 0 else depths[parent] + 1
        return np.array(depths, dtype=np.int32)

    def path_of(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes on the path that spells `tokens`, root first, as far as there is one."""
        path: list[int] = []
        node = ROOT
        for child, parent in enumerate(self.parent_list):
            if len(path) == len(tokens):
                break
            may_accept = self.never_accept is None or not self.never_accept[child]
            if may_accept and parent == node and self.token_list[child] == tokens[len(path)]:
                path.append(child)
                node = child
        return path

    def filled_up(self, num_nodes: int) -> TokenTree:
        """Return the tree with a chain of fillers behind its last node, `num_nodes` nodes in all.

        Fillers have token 0, and no other node has them as ancestors. A chain stays a chain. The
        result does not say which nodes must never be accepted.
        """
        num_fillers = num_nodes - self.num_nodes
        if num_fillers <= 0:
            return self
        fillers = np.arange(self.num_nodes - 1, num_nodes - 1, dtype=np.int32)
        return TokenTree(
            np.append(self.token_ids, np.zeros(num_fillers, dtype=np.int32)),
            np.append(self.parents, fillers),
        )

    def copy(self) -> TokenTree:
        """Return the same tree in arrays of its own."""
        return TokenTree(
            self.token_ids.copy(),
            self.parents.copy(),
            None if self.probabilities is None else self.probabilities.copy(),
            None if self.never_accept is None else self.never_accept.copy(),
        )

    def select(self, nodes: np.ndarray | slice, parents: np.ndarray) -> TokenTree:
        """Return some nodes in the given order, with `parents` as theirs, int32; a slice selects
        views."""
        return TokenTree(
            self.token_ids[nodes],
            parents,
            None if self.probabilities is None else self.probabilities[nodes],
            None if self.never_accept is None else self.never_accept[nodes],
        )

    def prefix(self, num_nodes: int) -> TokenTree:
        """Return the first `num_nodes` nodes (views), the tree itself if N is smaller."""
        if num_nodes >= self.num_nodes:
            return self
        nodes = slice(max(num_nodes, 0))
        return self.select(nodes, self.parents[nodes])

    def chain(self) -> TokenTree:
        """Return the leading first-child path, the likeliest path of a laid-out tree.

        The path ends before the first node that must never be accepted.
        """
        length = int((self.parents == np.arange(-1, self.num_nodes - 1)).cumprod().sum())
        if self.never_accept is not None:
            length = int((~self.never_accept[:length]).cumprod().sum())
        return self.prefix(length)

    def ancestor_words(self) -> np.ndarray:
        """Return uint64 [N, ceil(N / 64)]: bit `j % 64` of word `j // 64` in row i is set if j is i
        or an ancestor of i."""
        num_words = words_per_node(self.num_nodes)
        rows: list[int] = []
        for node, parent in enumerate(self.parent_list):
            rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
        if num_words <= 1:
            return np.array(rows, dtype=np.uint64).reshape(self.num_nodes, num_words)
        data = b"".join(row.to_bytes(num_words * 8, "little") for row in rows)
        return np.frombuffer(data, dtype="<u8").reshape(self.num_nodes, num_words)

    def ancestor_mask(self) -> np.ndarray:
        """Return bool [N, N], the readable twin of `ancestor_words`: row i sees column j if j is i
        or an ancestor of i."""
        mask = np.zeros((self.num_nodes, self.num_nodes), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] = mask[parent]
            mask[node, node] = True
        return mask

    def validate(self, vocab_size: int, max_nodes: int) -> None:
        """Check every rule of the class docstring.

        Raises:
            MalformedTreeError: Naming the first rule that is broken, the node and the value.
        """
        self._validate_array("token_ids", self.token_ids, np.int32)
        self._validate_array("parents", self.parents, np.int32)
        if self.probabilities is not None:
            self._validate_array("probabilities", self.probabilities, np.float32)
        if self.never_accept is not None:
            self._validate_array("never_accept", self.never_accept, np.bool_)
        if self.num_nodes > max_nodes:
            raise MalformedTreeError(
                f"the tree has {self.num_nodes} nodes, at most {max_nodes} are allowed"
            )
        tokens, parents = self.token_list, self.parent_list
        probabilities = None if self.probabilities is None else self.probabilities.tolist()
        seen: set[tuple[int, int]] = set()
        never_accept = (
            [False] * self.num_nodes if self.never_accept is None else self.never_accept.tolist()
        )
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if not ROOT <= parent < node:
                raise MalformedTreeError(
                    f"node {node} has parent {parent}; a parent is -1 or an earlier node"
                )
            if not 0 <= token < vocab_size:
                raise MalformedTreeError(
                    f"node {node} has token {token}; token ids are in [0, {vocab_size})"
                )
            if never_accept[node]:
                continue  # no walk can take it, so its token may be another child's too
            if (parent, token) in seen:
                raise MalformedTreeError(
                    f"node {node} repeats token {token} under parent {parent}; "
                    "the children of a node that may be accepted have distinct tokens"
                )
            seen.add((parent, token))
        if probabilities is not None:
            _validate_probabilities(probabilities, parents)

    def _validate_array(self, name: str, array: np.ndarray, dtype: type) -> None:
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            described = getattr(array, "dtype", type(array).__name__)
            raise MalformedTreeError(f"{name} is {described}, it must be a {dtype.__name__} array")
        if array.shape != (len(self.token_ids),):
            raise MalformedTreeError(
                f"{name} has shape {array.shape}, it must be ({len(self.token_ids)},)"
            )


def _validate_probabilities(values: list[float], parents: list[int]) -> None:
    for node, parent in enumerate(parents):
        limit = 1.0 if parent < 0 else values[parent]
        if not 0.0 <= values[node] <= limit:
            raise MalformedTreeError(
                f"node {node} has probability {values[node]}; a path probability is in "
                f"[0, {limit}], its parent's"
            )


_EMPTY = TokenTree(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))
