"""The drafter: heads, candidates, trees and state."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.extras.heads.unit.support import (
    VOCAB,
    describe,
    make_medusa,
    make_requests,
    random_heads,
)
from tests.unit.drafters.support import end, make_context
from vllm_trie.drafts.registry import parse_options
from vllm_trie.extras.heads.drafter import MedusaDrafter
from vllm_trie.extras.heads.reading import CheckpointError
from vllm_trie.extras.heads.training.writing import save_vllm


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shares_output", [False, True])
def test_heads_compute_what_the_paper_says(has_bias, shares_output):
    heads = random_heads(num_layers=2, has_bias=has_bias, shares_output=shares_output)
    hidden = torch.randn(5, 16)
    stacked = heads(hidden)
    for k in range(3):
        x = hidden
        for layer in range(2):
            bias = heads.block_bias[k, layer] if has_bias else 0.0
            x = x + F.silu(x @ heads.block_weight[k, layer].T + bias)
        expected = x @ heads.output_weight[0 if shares_output else k].T
        torch.testing.assert_close(stacked[k], expected)
        torch.testing.assert_close(heads.head(k, hidden), expected)


@pytest.mark.parametrize("joint", ["product", "context"])
def test_first_node_is_the_first_heads_guess(joint):
    """Head 1 speaks of the token after the one that is committed already."""
    heads = random_heads()
    requests = make_requests(1)
    requests[0].token_ids = np.arange(40, dtype=np.int32)  # nothing repeats
    tree = make_medusa(heads, joint=joint).propose(requests)[0]
    logits = heads(requests[0].hidden_state[None])[:, 0]
    assert tree.token_ids[0] == logits[0].argmax()
    second = [i for i in range(tree.num_nodes) if tree.parents[i] == 0]
    assert tree.token_ids[second[0]] == logits[1].argmax()


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_nodes": 7, "max_depth": 2}, {"max_nodes": 7, "max_depth": 3, "chain_only": True}],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [{}, {"joint": "product"}, {"num_heads": 2, "top_tokens": 5, "max_depth": 2}],
    ids=str,
)
def test_trees_are_valid_and_the_same_alone_or_in_a_batch(options, limits):
    heads = random_heads(num_heads=4)
    batch = describe(make_medusa(heads, **options).propose(make_requests(4, **limits)))
    one_by_one = make_medusa(heads, **options)
    max_depth = min(options.get("max_depth", 50), limits.get("max_depth", 50))
    for request, expected in zip(make_requests(4, **limits), batch, strict=True):
        tree = one_by_one.propose([request])[0]
        tree.validate(VOCAB, request.max_nodes)
        described = describe([tree])[0]
        assert described[:2] == expected[:2]
        assert described[2] == pytest.approx(expected[2], rel=1e-4)
        assert tree.depths().max() <= max_depth
        if limits:
            assert tree.depths().max() == max_depth
            assert tree.num_nodes == (max_depth if request.chain_only else request.max_nodes)
        assert tree.is_chain or not request.chain_only


def test_released_and_changed_requests():
    heads = random_heads()
    drafter = make_medusa(heads)
    fresh = describe(make_medusa(heads).propose(make_requests(3, seed=1)))
    drafter.propose(make_requests(3))
    assert describe(drafter.propose(make_requests(3, seed=1))) == fresh  # same ids, other texts
    for name in ("r0", "r1", "r2", "r2", "unknown"):
        end(drafter, name)
    assert drafter._texts.num_tokens == 0


def test_temperatures_of_the_checkpoint(tmp_path):
    save_vllm(random_heads(), tmp_path, (3.0, 3.0, 3.0))

    def first(**options):
        drafter = make_medusa(path=tmp_path, joint="product", **options)
        drafter.load_model(None)
        return drafter.propose(make_requests(1))[0].probabilities[0]

    assert first(calibrate=False) > first() > 0.0


def test_more_than_the_checkpoint_has(tmp_path):
    save_vllm(random_heads(num_heads=2), tmp_path)
    with pytest.raises(CheckpointError, match="num_heads=3"):
        make_medusa(path=tmp_path, num_heads=3).load_model(None)


def test_without_heads():
    with pytest.raises(ValueError, match="needs the Medusa heads"):
        MedusaDrafter(parse_options("medusa_dynamic", {}), make_context())
    with pytest.raises(RuntimeError, match="not loaded"):
        make_medusa().propose(make_requests())
