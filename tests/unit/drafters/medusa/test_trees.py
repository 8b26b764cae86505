"""Fixed trees."""

from __future__ import annotations

import numpy as np
import pytest
from support.fitted_trees import fit_paths

from vllm_trie.drafters.medusa.trees import PUBLISHED, check_paths, template


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_lists_are_trees_of_63(name):
    paths = PUBLISHED[name]
    assert len(paths) == len(set(paths)) == 63
    assert check_paths(paths) == paths  # every path comes after its parent
    assert max(map(len, paths)) == 4


@pytest.mark.parametrize("num_nodes", [1, 16, 63])
@pytest.mark.parametrize("max_depth", [1, 3, 9])
def test_filled_tree_holds_the_named_candidates(num_nodes, max_depth):
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(100)[:10] for _ in range(4)]).astype(np.int32)
    shares = -np.sort(-rng.dirichlet(np.ones(100), 4)[:, :10], axis=1).astype(np.float32)
    paths = PUBLISHED["mc_sim_7b_63"]
    tree = template(paths, num_nodes, max_depth, False).fill(tokens, shares)
    tree.validate(100, num_nodes)

    found = {}
    for node in range(tree.num_nodes):
        path, at = [], node
        while at >= 0:
            path.append(int(tree.token_ids[at]))
            at = int(tree.parents[at])
        found[tuple(path[::-1])] = float(tree.probabilities[node])
    expected = {
        tuple(int(tokens[head, rank]) for head, rank in enumerate(path)): float(
            np.prod([shares[head, rank] for head, rank in enumerate(path)])
        )
        for path in [p for p in paths if len(p) <= max_depth][:num_nodes]
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_chain_only_takes_the_best_candidates_alone():
    tree = template(PUBLISHED["mc_sim_7b_63"], 63, 9, True)
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.ranks.tolist() == [0, 0, 0, 0]


def test_fitted_tree_of_skewed_heads():
    accuracies = np.array([[0.6, 0.3], [0.5, 0.1]])
    assert fit_paths(accuracies, 4) == ((0,), (0, 0), (1,), (1, 0))


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "no paths"),
        ([[0], []], "not allowed"),
        ([[-1]], "not allowed"),
        ([[0], [0]], "occurs twice"),
        ([[0], [1, 0]], r"lacks its parent \[1\]"),
    ],
)
def test_wrong_lists(paths, words):
    with pytest.raises(ValueError, match=words):
        check_paths(paths)


def test_a_list_in_any_order_becomes_a_tree():
    assert check_paths([[0, 1], [0], [0, 0]]) == ((0,), (0, 0), (0, 1))
