"""Random token trees for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from vllm_trie.tree import TokenTree


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
