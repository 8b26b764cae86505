"""The shapes of the tree kernel's programs on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.engine.conftest import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("num_queries", "group", "rows"),
    [(1, 4, 16), (9, 4, 64), (33, 4, 64), (1, 128, 128), (9, 128, 128)],
)
def test_programs_take_a_request_at_once_or_up_to_64_rows_or_one_query(num_queries, group, rows):
    from vllm_trie.attention.gpu_launch import choose_launch

    assert choose_launch(num_queries, group, 64, torch.bfloat16).rows == rows


def test_more_query_heads_than_rows_are_refused():
    from vllm_trie.attention.gpu_launch import choose_launch

    with pytest.raises(ValueError, match=r"at most 128 query heads .* has 256"):
        choose_launch(1, 256, 64, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("longest", [2, 9, 32, 65])
def test_a_start_uses_every_launch(longest, head_size, dtype):
    from vllm_trie.attention.gpu_launch import choose_launch, lengths_of_launches

    for group in (1, 2, 4, 8, 16, 32):
        chosen = {choose_launch(n, group, head_size, dtype) for n in range(1, longest + 1)}
        lengths = lengths_of_launches(longest, group, head_size, dtype)
        assert {choose_launch(n, group, head_size, dtype) for n in lengths} == chosen
        assert max(lengths) <= longest
