"""The compiled choice of each head's likeliest tokens against torch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.drafters.medusa.candidates import (
    LIBRARY,
    HeadLogits,
    reads,
    top_candidates,
    top_candidates_torch,
)

pytestmark = pytest.mark.skipif(not LIBRARY.is_available(), reason="no C++ compiler here")


@st.composite
def cases(draw):
    """Logits of some heads at some rows, half of the time with a token map."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_heads, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_outputs = draw(st.one_of(st.integers(1, 200), st.integers(1000, 9000)))
    logits = torch.randn(num_heads, num_rows, num_outputs, generator=generator)
    logits *= draw(st.sampled_from([0.0, 0.1, 3.0, 40.0]))
    logits -= draw(st.sampled_from([0.0, 100.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    temperatures = 0.3 + 2.0 * torch.rand(num_heads, generator=generator)
    token_map = torch.randperm(3 * num_outputs, generator=generator)[:num_outputs]
    return HeadLogits(
        logits.to(dtype),
        temperatures,
        token_map if draw(st.booleans()) else None,
        draw(st.integers(1, 70)),
    )


def plain(logits: torch.Tensor, num_candidates: int) -> HeadLogits:
    return HeadLogits(logits, torch.ones(len(logits)), None, num_candidates)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_equals_torch(logits):
    assert reads(logits.data.device, logits.data.dtype)
    tokens, probabilities = top_candidates(logits)
    _, twin_probabilities = top_candidates_torch(logits)
    assert tokens.shape == probabilities.shape == twin_probabilities.shape
    np.testing.assert_allclose(probabilities, twin_probabilities, rtol=1e-4, atol=1e-7)
    outputs = torch.from_numpy(tokens).long()
    if logits.token_map is not None:
        assert (np.isin(tokens, logits.token_map.numpy())).all()
        outputs = torch.argsort(logits.token_map)[
            torch.searchsorted(torch.sort(logits.token_map).values, outputs)
        ]
    # Distinct outputs with the very logits; of equal logits, the first output comes first.
    chosen = logits.data.transpose(0, 1).gather(-1, outputs)
    wanted = logits.data.float().transpose(0, 1).topk(outputs.shape[-1]).values
    assert torch.equal(chosen.float(), wanted)
    for row in outputs.flatten(0, 1):
        assert len(set(row.tolist())) == len(row)
    ties = chosen[..., 1:] == chosen[..., :-1]
    assert (outputs[..., 1:] > outputs[..., :-1])[ties].all()


def test_strides_and_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        wide = torch.randn(3, 40, 700)
        part = wide[:, ::2, 50:650]
        tokens, probabilities = top_candidates(plain(part, 9))
        expected = torch.softmax(part.transpose(0, 1), dim=-1).topk(9)
        assert tokens.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(probabilities, expected.values, rtol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("function", [top_candidates, top_candidates_torch])
@pytest.mark.parametrize("place", [0, 17, 299])
@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_without_a_softmax_are_not_believed(function, place, poison, dtype):
    logits = torch.randn(2, 1, 300, dtype=dtype)
    logits[1, 0, place] = poison
    tokens, probabilities = function(plain(logits, 5))
    assert logits[0, 0, tokens[0, 0]].tolist() == logits[0, 0].topk(5).values.tolist()
    assert probabilities[0, 0].min() > 0.0
    assert probabilities[0, 1].tolist() == [0.0] * 5
    assert len(set(tokens[0, 1].tolist())) == 5
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("function", [top_candidates, top_candidates_torch])
def test_excluded_outputs_have_no_probability(function):
    logits = torch.full((2, 1, 5000), -torch.inf)
    logits[0, 0, [7, 130]] = torch.tensor([1.0, 2.0])
    logits[0, 0, 4999] = 3.0
    tokens, probabilities = function(plain(logits, 4))
    assert tokens[0, 0].tolist()[:3] == [4999, 130, 7]
    assert probabilities[0, 0].sum() == pytest.approx(1.0)
    assert probabilities[0, 0, 3] == 0.0
    assert probabilities[0, 1].tolist() == [0.0] * 4


def test_other_dtypes_are_left_to_torch():
    logits = torch.randn(1, 1, 50).double()
    assert not reads(logits.device, logits.dtype)
    assert top_candidates(plain(logits, 3))[0].tolist() == logits.topk(3).indices.tolist()
