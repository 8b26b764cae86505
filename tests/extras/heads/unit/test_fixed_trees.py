"""Fixed trees."""

from __future__ import annotations

import numpy as np
import pytest
from support.fixed_trees import PUBLISHED, template

from vllm_trie.tree import TokenTree


def test_the_published_list_is_a_tree_of_63():
    assert len(PUBLISHED) == len(set(PUBLISHED)) == 63
    assert all(len(path) == 1 or path[:-1] in PUBLISHED[:i] for i, path in enumerate(PUBLISHED))
    assert max(map(len, PUBLISHED)) == 4


@pytest.mark.parametrize("num_nodes", [1, 16, 63])
@pytest.mark.parametrize("max_depth", [1, 3, 9])
def test_filled_tree_holds_the_named_candidates(num_nodes, max_depth):
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(100)[:10] for _ in range(4)]).astype(np.int32)
    shares = -np.sort(-rng.dirichlet(np.ones(100), 4)[:, :10], axis=1).astype(np.float32)
    tree = template(PUBLISHED, num_nodes, max_depth, False).fill(tokens, shares)
    tree.validate(100, num_nodes)

    probabilities = {}
    for node in range(tree.num_nodes):
        path, at = [], node
        while at >= 0:
            path.append(int(tree.token_ids[at]))
            at = int(tree.parents[at])
        probabilities[tuple(path[::-1])] = float(tree.probabilities[node])
    expected = {
        tuple(int(tokens[head, rank]) for head, rank in enumerate(path)): float(
            np.prod([shares[head, rank] for head, rank in enumerate(path)])
        )
        for path in [p for p in PUBLISHED if len(p) <= max_depth][:num_nodes]
    }
    assert probabilities == pytest.approx(expected, rel=1e-5)


def test_xformers_derives_the_same_mask_depths_and_parents():
    """An independent reading of a list of paths."""
    tree_attention = pytest.importorskip(
        "xformers.ops.tree_attention", reason="no xFormers: requirements/cpu.txt has it"
    )
    theirs = tree_attention.TreeAttnMetadata.from_tree_choices(list(PUBLISHED))
    parents = template(PUBLISHED, len(PUBLISHED), 9, False).parents
    ours = TokenTree(np.zeros(len(PUBLISHED), np.int32), parents)
    # They order nodes by depth, after a root of their own; here they are depth-first.
    order = [sorted(PUBLISHED).index(path) for path in theirs.tree_choices]
    mask = theirs.attention_bias.numpy() == 0
    assert mask[:, 0].all()
    np.testing.assert_array_equal(ours.ancestor_mask()[np.ix_(order, order)], mask[1:, 1:])
    depths = theirs.tree_seq_position_ids[1:].numpy()
    np.testing.assert_array_equal(ours.depths()[order], depths)
    nodes = np.array([-1, *order])  # of their nodes, the root first
    np.testing.assert_array_equal(parents[order], nodes[theirs.parent_node_indices.numpy()])
