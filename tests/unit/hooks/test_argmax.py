"""The argmax of bfloat16 logits is that of their values, whatever they are."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.vllm_hooks.worker.verification.sampling import argmax_of_logits

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x3F80, 0xBF80, 0x0001, 0x8001]
BITS = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))


def logits_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(BITS, min_size=n, max_size=n))))
def test_any_bits(rows: list[list[int]]) -> None:
    logits = logits_of(rows or [[0]])
    expected = logits.float().numpy().argmax(axis=-1)
    assert argmax_of_logits(mock.Mock(), logits).tolist() == expected.tolist()


def test_ordinary_logits_are_not_widened() -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[3] = -torch.inf
    logits[3, 7] = -2.0
    expected = logits.float().numpy().argmax(axis=-1)
    with mock.patch.object(torch.Tensor, "float", side_effect=AssertionError):
        assert argmax_of_logits(mock.Mock(), logits).tolist() == expected.tolist()
