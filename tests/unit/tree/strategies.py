"""Random token trees for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from vllm_trie.tree import TokenTree

VOCAB = 6
WRONG_TREES: list[tuple[list[int], list[int], list[float] | None, str]] = [
    ([1, 2], [-1, 1], None, "node 1 has parent 1"),
    ([1, 2], [-1, -2], None, "node 1 has parent -2"),
    ([1, VOCAB], [-1, 0], None, rf"node 1 has token {VOCAB}.*\[0, {VOCAB}\)"),
    ([-1], [-1], None, "node 0 has token -1"),
    ([1, 1], [-1, -1], None, "node 1 repeats token 1 under parent -1"),
    ([1, 2, 2], [-1, 0, 0], None, "node 2 repeats token 2 under parent 0"),
    ([1, 2], [-1], None, r"parents has shape \(1,\), it must be \(2,\)"),
    ([1, 2], [-1, 0], [0.5, 0.75], "node 1 has probability 0.75.*0.5"),
    ([1], [-1], [1.5], "node 0 has probability 1.5"),
    ([1], [-1], [-0.1], "node 0 has probability -0.1"),
    ([1], [-1], [float("nan")], "node 0 has probability nan"),
    ([1, 2], [-1, 0], [0.5], r"probabilities has shape \(1,\)"),
]
"""Token ids, parents, probabilities, and what is wrong with them."""


@st.composite
def token_trees(
    draw: st.DrawFn,
    max_nodes: int = 40,
    vocab_size: int = 6,
    with_probabilities: bool | None = None,
) -> TokenTree:
    """Valid trees whose nodes are in any order that puts parents first."""
    size = draw(st.integers(0, max_nodes))
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(size):
        parent = draw(st.integers(-1, len(tokens) - 1))
        token = draw(st.integers(0, vocab_size - 1))
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        above = 1.0 if parent < 0 else probabilities[parent]
        share = draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
        tokens.append(token)
        parents.append(parent)
        probabilities.append(above * share)
    if with_probabilities is None:
        with_probabilities = draw(st.booleans())
    return TokenTree.from_lists(tokens, parents, probabilities if with_probabilities else None)


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    """Tokens on the path to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def flags(draw: st.DrawFn, size: int) -> np.ndarray:
    return np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool)
