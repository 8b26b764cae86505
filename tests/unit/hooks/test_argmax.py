"""Reading logits once gives their argmax, whatever they are, and the likeliest tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.attention.native import NativeKernels
from vllm_trie.drafts.ngrams.native import ROW_TOKENS

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x3F80, 0xBF80, 0x0001, 0x8001]
BITS = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))


@pytest.fixture(scope="module", params=[None, "x86-64-v3", "baseline"])
def likeliest(request):
    """The kernel for each instruction set that this machine has."""
    if request.param == "x86-64-v3" and not torch.cpu._is_avx2_supported():
        pytest.skip("this CPU has no AVX2")
    return NativeKernels(request.param).likeliest


def logits_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(BITS, min_size=n, max_size=n))))
def test_any_bits(likeliest, rows):
    logits = logits_of(rows or [[0]])
    expected = logits.float().numpy().argmax(axis=-1)
    assert likeliest(logits, 1)[0][:, 0].tolist() == expected.tolist()


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(ROW_TOKENS, 3000),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_likeliest_of_any_shape(likeliest, dtype, vocab_size, values, seed):
    """Few different values make ties, of which the smallest token comes first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-values, values, (3, vocab_size + 5), generator=generator) / 3
    logits = logits.to(dtype)[:, :vocab_size]
    logits[0, : vocab_size - 3] = -torch.inf
    tokens, probabilities = likeliest(logits, ROW_TOKENS)
    expected = logits.float().sort(descending=True, stable=True)
    assert tokens.tolist() == expected.indices[:, :ROW_TOKENS].tolist()
    softmax = expected.values.softmax(-1)[:, :ROW_TOKENS]
    torch.testing.assert_close(torch.from_numpy(probabilities), softmax, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("value", [1e4, 1e8, 1e10])
def test_probabilities_of_large_logits(likeliest, value):
    logits = torch.zeros(2, 1000)
    logits[:, 3] = logits[:, 700] = value
    assert likeliest(logits, ROW_TOKENS)[1][:, :2].ravel().tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_distribution_have_no_probabilities(likeliest, value):
    logits = torch.zeros(2, 1000)
    logits[0, 600] = value
    if value == -torch.inf:
        logits[0] = value
    tokens, probabilities = likeliest(logits, ROW_TOKENS)
    assert tokens[:, 0].tolist() == logits.numpy().argmax(axis=-1).tolist()
    assert probabilities[0].tolist() == [0.0] * ROW_TOKENS
    assert probabilities[1, 0] == pytest.approx(0.001)
