"""Trees survive the way from one rank to another."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import flags, token_trees
from vllm_trie.tree import TokenTree
from vllm_trie.vllm_hooks.worker.drafting.tree_exchange import pack, unpack


@st.composite
def flagged_trees(draw: st.DrawFn) -> TokenTree:
    tree = draw(token_trees(max_nodes=12))
    if draw(st.booleans()):
        tree = dataclasses.replace(tree, never_accept=flags(draw, tree.num_nodes))
    return tree


def never_accepted(tree: TokenTree) -> list[bool]:
    return [False] * tree.num_nodes if tree.never_accept is None else tree.never_accept.tolist()


@given(st.lists(flagged_trees(), min_size=1, max_size=5))
def test_unpack_is_the_inverse_of_pack(trees: list[TokenTree]) -> None:
    packed = pack(trees)
    assert packed.dtype == np.int32
    assert len(packed) == len(trees) + 3 * sum(tree.num_nodes for tree in trees)
    found = unpack(packed, len(trees))
    assert len(found) == len(trees)
    for before, after in zip(trees, found, strict=True):
        assert np.array_equal(before.token_ids, after.token_ids)
        assert np.array_equal(before.parents, after.parents)
        never = np.zeros(before.num_nodes) if before.never_accept is None else before.never_accept
        found_never = (
            np.zeros(after.num_nodes) if after.never_accept is None else after.never_accept
        )
        assert np.array_equal(never, found_never)
        after.validate(vocab_size=6, max_nodes=12)
