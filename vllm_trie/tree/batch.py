"""Work on all trees of a batch at once, in compiled code and NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from vllm_trie.native import NativeLibrary
from vllm_trie.tree.token_tree import ROOT, TokenTree, words_per_node

LIBRARY = NativeLibrary("trees", [Path(__file__).parent / "core" / "trees.cpp"])
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_EMPTY = TokenTree.empty()


def check_all(trees: Sequence[TokenTree], vocab_size: int, copies: bool) -> list[TokenTree] | None:
    """Return all trees if they are valid.

    Args:
        trees: Of a batch.
        vocab_size: Of the target model.
        copies: Whether to return copies, in arrays that they share.

    Returns:
        None if a tree breaks a rule of :meth:`TokenTree.validate` or has nodes that are never
        accepted, or if only some have probabilities: each is to be looked at then. No tree's size
        is checked.

    Raises:
        AttributeError, TypeError, ValueError: An element is no tree.
    """
    full = [tree for tree in trees if tree is not _EMPTY]
    if not full:
        return list(trees)
    tokens = [tree.token_ids for tree in full]
    parents = [tree.parents for tree in full]
    predicted = [tree.probabilities for tree in full if tree.probabilities is not None]
    shapes = [array.shape for array in tokens]
    if (
        any(len(shape) != 1 for shape in shapes)
        or shapes != [array.shape for array in parents]
        or (predicted and shapes != [array.shape for array in predicted])
        or any(tree.never_accept is not None for tree in full)
        or any(array.dtype is not _INT32 for array in (*tokens, *parents))
        or any(array.dtype is not _FLOAT32 for array in predicted)
    ):
        return None
    # Bytes reach compiled code in a tenth of the time of an array's address.
    joined = [
        b"".join([array.tobytes() for array in part]) for part in (tokens, parents, predicted)
    ]
    sizes = [size for (size,) in shapes]
    counts = np.array(sizes, dtype=np.int32).tobytes()
    arguments = *joined[:2], joined[2] or None, counts, len(full), vocab_size
    if not LIBRARY.functions.trees_are_valid(*arguments):
        return None
    if not copies:
        return list(trees)
    owned = iter(
        _split(
            np.frombuffer(joined[0], dtype=np.int32),
            np.frombuffer(joined[1], dtype=np.int32),
            np.frombuffer(joined[2], dtype=np.float32) if predicted else None,
            None,
            sizes,
        )
    )
    return [tree if tree is _EMPTY else next(owned) for tree in trees]


def place(trees: Sequence[TokenTree], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each node in a step, and which nodes it sees.

    Args:
        trees: With nodes.
        rows: int64 [num_trees, 6], batch index, first query token, number of query tokens, number
            of nodes; the other numbers do not matter.

    Returns:
        int64 [2, nodes of all trees], the query token of each node, and its position, which follows
        its depth, less that of its slot; and uint64, the :meth:`TokenTree.ancestor_words` of all
        trees, one after another.
    """
    sizes = rows[:, 3]
    places = np.empty((2, sizes.sum()), dtype=np.int64)
    parents = np.concatenate([tree.parents for tree in trees])
    words = np.empty((sizes * words_per_node(sizes)).sum(), dtype=np.uint64)
    LIBRARY.functions.trees_place(
        *(parents.ctypes.data, rows.ctypes.data, len(rows)),
        *(places.ctypes.data, places[1].ctypes.data, words.ctypes.data),
    )
    return places, words


def accept_greedy(
    tree_token_ids: Sequence[int],
    parents: Sequence[int],
    target: Sequence[int],
    never_accept: Sequence[bool] | np.ndarray | None = None,
) -> list[int]:
    """Return the path of the tree that the target model's own choices follow.

    Args:
        tree_token_ids: N draft tokens (a list: indexing NumPy arrays here is ten times slower).
        parents: N parent indices, parents before children, -1 for the root.
        target: N + 1 tokens; `target[0]` is the target's token after the last committed token and
            `target[i + 1]` its token after node i.
        never_accept: N flags of nodes that must not be accepted, or None.

    Returns:
        The accepted node indices, root first. The step's output tokens are the accepted nodes'
        tokens and then the bonus token `target[last + 1]` (`target[0]` if nothing was accepted).
    """
    accepted: list[int] = []
    node, token = ROOT, target[0]
    # Children follow their parents, so one pass in index order visits every path.
    for child, parent in enumerate(parents):
        if (
            parent == node
            and tree_token_ids[child] == token
            and not (never_accept is not None and never_accept[child])
        ):
            accepted.append(child)
            node = child
            token = target[child + 1]
    return accepted


def accept_all(
    trees: Sequence[TokenTree], target: np.ndarray
) -> tuple[list[list[int]], list[list[int]]]:
    """Walk down all trees, see :func:`accept_greedy`.

    Args:
        trees: Of the batch, empty ones included.
        target: int64 [N + 1 for each tree], the target's token after the last committed token and
            after each node.

    Returns:
        Output tokens of each tree, the bonus token last, and its accepted nodes.
    """
    outputs, paths, first, sampled_tokens = [], [], 0, target.tolist()
    for tree in trees:
        tokens = tree.token_list
        sampled = sampled_tokens[first : first + len(tokens) + 1]
        first += len(sampled)
        path = accept_greedy(tokens, tree.parent_list, sampled, tree.never_accept)
        paths.append(path)
        outputs.append([*(tokens[node] for node in path), sampled[path[-1] + 1 if path else 0]])
    return outputs, paths


def select_all(trees: Sequence[TokenTree], keep: np.ndarray) -> list[TokenTree]:
    """Return each tree's nodes that are kept, in arrays that the trees share.

    Args:
        trees: With probabilities.
        keep: bool [nodes of all trees], one tree after another; a kept node's parent is kept too.
    """
    predicted = [tree.probabilities for tree in trees if tree.probabilities is not None]
    sizes = np.array([tree.num_nodes for tree in trees])
    starts = np.cumsum(sizes) - sizes
    num_kept_before = np.concatenate([[0], np.cumsum(keep, dtype=np.int32)])
    bounds = num_kept_before[np.append(starts, len(keep))]
    kept = np.flatnonzero(keep)
    parents = np.concatenate([tree.parents for tree in trees])[kept]
    owners = np.repeat(np.arange(len(trees)), np.diff(bounds))
    moved = num_kept_before[parents + starts[owners]] - bounds[owners]
    parents = np.where(parents < 0, parents, moved).astype(np.int32)
    return _split(
        np.concatenate([tree.token_ids for tree in trees])[kept],
        parents,
        np.concatenate(predicted)[kept],
        None if all(tree.never_accept is None for tree in trees) else _never_accept(trees)[kept],
        np.diff(bounds).tolist(),
    )


def _split(
    tokens: np.ndarray,
    parents: np.ndarray,
    predicted: np.ndarray | None,
    never_accept: np.ndarray | None,
    sizes: Sequence[int],
) -> list[TokenTree]:
    """Return views of trees that lie one after another."""
    return [
        TokenTree(
            tokens[start:end],
            parents[start:end],
            None if predicted is None else predicted[start:end],
            None if never_accept is None else never_accept[start:end],
        )
        if end > start
        else _EMPTY
        for start, end in pairwise([0, *accumulate(sizes)])
    ]


def _never_accept(trees: Sequence[TokenTree]) -> np.ndarray:
    """Return bool [nodes of all trees]."""
    return np.concatenate(
        [
            np.zeros(tree.num_nodes, dtype=bool) if tree.never_accept is None else tree.never_accept
            for tree in trees
        ]
    )
