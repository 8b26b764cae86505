"""Each head's likeliest tokens and their probabilities."""

import numpy as np
import pytest
import torch

from vllm_trie.extras.heads.candidates import top_candidates


def plain(logits, num_candidates):
    """The candidates of uncalibrated heads, all of whose outputs are tokens."""
    return top_candidates(logits, torch.ones(len(logits)), None, num_candidates)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_are_those_of_a_softmax(dtype):
    wide = torch.randn(3, 40, 700).to(dtype)
    part = wide[:, ::2, 50:650]
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    tokens, probabilities, _ = top_candidates(part, temperatures, None, 9)
    assert tokens.shape == probabilities.shape == (20, 3, 9)
    expected = torch.softmax(part.float() / temperatures[:, None, None], dim=-1).transpose(0, 1)
    best = expected.topk(9).values
    np.testing.assert_allclose(probabilities, best, rtol=1e-4, atol=1e-7)
    of_tokens = expected.gather(-1, torch.from_numpy(tokens).long())
    np.testing.assert_allclose(of_tokens, best, rtol=1e-4, atol=1e-7)


def test_outputs_are_mapped_to_tokens():
    token_map = torch.randperm(1000)[:50]
    logits = torch.randn(2, 3, 50)
    tokens, probabilities, _ = top_candidates(logits, torch.ones(2), token_map, 70)
    outputs = logits.transpose(0, 1).argsort(-1, descending=True)
    assert tokens.tolist() == token_map[outputs].tolist()
    np.testing.assert_allclose(probabilities.sum(-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("place", [0, 17, 299])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_without_a_softmax_are_not_believed(place, poison, dtype):
    logits = torch.randn(2, 1, 300, dtype=dtype)
    logits[1, 0, place] = poison
    tokens, probabilities, _ = plain(logits, 5)
    assert logits[0, 0, tokens[0, 0]].tolist() == logits[0, 0].topk(5).values.tolist()
    assert probabilities[0, 0].min() > 0.0
    assert probabilities[0, 1].tolist() == [0.0] * 5
    assert len(set(tokens[0, 1].tolist())) == 5
    assert ((tokens >= 0) & (tokens < 300)).all()


def test_excluded_outputs_have_no_probability():
    logits = torch.full((2, 1, 5000), -torch.inf)
    logits[0, 0, [7, 130]] = torch.tensor([1.0, 2.0])
    logits[0, 0, 4999] = 3.0
    tokens, probabilities, _ = plain(logits, 4)
    assert tokens[0, 0].tolist()[:3] == [4999, 130, 7]
    assert probabilities[0, 0].sum() == pytest.approx(1.0)
    assert probabilities[0, 0, 3] == 0.0
    assert probabilities[0, 1].tolist() == [0.0] * 4
