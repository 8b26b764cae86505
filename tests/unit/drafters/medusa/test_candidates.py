"""The compiled choice of each head's likeliest tokens against torch's operations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.drafters.medusa import native
from vllm_trie.drafters.medusa.candidates import top_candidates, top_candidates_torch

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")


@st.composite
def cases(draw):
    """Logits [K, rows, num_outputs], a number of tokens and temperatures."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    num_heads, num_rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_outputs = draw(st.one_of(st.integers(1, 200), st.integers(1000, 9000)))
    logits = torch.randn(num_heads, num_rows, num_outputs, generator=generator)
    logits *= draw(st.sampled_from([0.0, 0.1, 3.0, 40.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    temperatures = 0.3 + 2.0 * torch.rand(num_heads, generator=generator)
    return logits.to(dtype), draw(st.integers(1, 70)), temperatures


@given(cases())
@settings(max_examples=150, deadline=None)
def test_equals_torch(case):
    logits = case[0]
    found = native.top_candidates(*case)
    assert found is not None
    outputs, probabilities = found
    twin_outputs, twin_probabilities = top_candidates_torch(*case)
    assert outputs.shape == probabilities.shape == twin_outputs.shape
    torch.testing.assert_close(probabilities, twin_probabilities, rtol=1e-4, atol=1e-7)
    # Distinct outputs with the very logits; of equal logits, the first output comes first.
    chosen = logits.transpose(0, 1).gather(-1, outputs.long())
    wanted = logits.float().transpose(0, 1).topk(outputs.shape[-1]).values
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
        outputs, probabilities = native.top_candidates(part, 9, torch.ones(3))
        expected = torch.softmax(part.transpose(0, 1), dim=-1).topk(9)
        assert torch.equal(outputs.long(), expected.indices)
        torch.testing.assert_close(probabilities, expected.values)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_logits_without_a_softmax_go_to_torch(poison):
    logits = torch.randn(2, 1, 300)
    logits[1] = poison
    assert native.top_candidates(logits, 5, torch.ones(2)) is None
    outputs, _ = top_candidates(logits, 5, torch.ones(2))
    assert outputs[0, 0].tolist() == logits[0, 0].topk(5).indices.tolist()


def test_excluded_outputs_have_no_probability():
    logits = torch.full((1, 1, 500), -torch.inf)
    logits[0, 0, [7, 130]] = torch.tensor([1.0, 2.0])
    outputs, probabilities = native.top_candidates(logits, 4, torch.ones(1))
    assert outputs[0, 0].tolist()[:2] == [130, 7]
    assert probabilities[0, 0].tolist()[2:] == [0.0, 0.0]


def test_other_dtypes_are_left_to_torch():
    assert native.top_candidates(torch.randn(1, 1, 50).double(), 3, torch.ones(1)) is None
