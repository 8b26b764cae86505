"""Leaving the requests with trees out of a step's metadata."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.attention import TreeRow, build_tree_batch
from vllm_trie.drafts.engine.attention.plain_requests import plain_requests


@dataclass
class Metadata:
    """The fields that vLLM's backends have in common, and one of their own."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    causal: bool = True


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=2, max_size=9))
def test_every_row_is_in_one_part(requests):
    requests = [*requests, (2, False), (3, True)]  # there is always something to split
    lengths = [length for length, _ in requests]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens = int(starts[-1])
    seq_lens = torch.arange(100, 100 + len(requests), dtype=torch.int32)
    block_table = torch.arange(len(requests) * 3, dtype=torch.int32).view(-1, 3)
    metadata = Metadata(
        num_tokens, max(lengths), torch.from_numpy(starts), seq_lens, block_table, causal=False
    )
    with_tree = [index for index, (_, has_tree) in enumerate(requests) if has_tree]
    rows = [
        TreeRow(index, int(starts[index]), lengths[index], 1, int(seq_lens[index]))
        for index in with_tree
    ]
    words = [np.ones((1, 1), dtype=np.uint64) for _ in rows]
    plain = plain_requests(metadata, build_tree_batch(rows, words, num_tokens))

    others = [index for index in range(len(requests)) if index not in with_tree]
    tokens = torch.arange(num_tokens).view(-1, 1, 1)
    taken = plain.take(tokens)
    plain_tokens = [token for i in others for token in range(starts[i], starts[i + 1])]
    assert taken.flatten().tolist() == plain_tokens
    assert plain.metadata.num_actual_tokens == len(plain_tokens)
    assert plain.metadata.max_query_len == max(lengths[i] for i in others)
    assert plain.metadata.query_start_loc.tolist() == [
        0,
        *np.cumsum([lengths[i] for i in others]).tolist(),
    ]
    assert plain.metadata.query_start_loc.dtype == torch.int32
    assert torch.equal(plain.metadata.seq_lens, seq_lens[others])
    assert torch.equal(plain.metadata.block_table, block_table[others])
    assert plain.metadata.causal is False
    assert metadata.num_actual_tokens == num_tokens

    written = torch.zeros_like(tokens)
    target = plain.take(written)
    target += 1
    plain.put_back(target, written)
    assert np.flatnonzero(written.flatten()).tolist() == plain_tokens
