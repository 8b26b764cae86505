"""Leaving the requests with trees out of a step's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

from tests.unit.attention.paged_cases import RequestShape, attention_kind, paged_case
from vllm_trie.attention import TreeRow, build_tree_batch, tree_attention
from vllm_trie.drafts.engine.attention.plain_requests import plain_requests
from vllm_trie.drafts.engine.attention.tree_attention import in_chunks


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


def test_trees_in_chunks():
    """vLLM's metadata of layers that attend in chunks, with requests without trees between."""
    requests = [RequestShape(70, 1, 40), RequestShape(31, 60, 0), RequestShape(62, 3, 90)]
    kind = attention_kind(4, chunk=32)
    case = paged_case(requests, torch.float32, 4, 2, 32, 16, seed=0, kind=kind)
    rows = case.trees.rows
    starts = torch.tensor([0, *accumulate(row.num_queries for row in rows)], dtype=torch.int32)
    seq_lens = torch.tensor([row.seq_len for row in rows], dtype=torch.int32)
    metadata, _ = make_local_attention_virtual_batches(
        32,
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            num_reqs=len(rows),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(row.num_queries for row in rows),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=case.block_table,
            slot_mapping=torch.empty(0, dtype=torch.int64),
        ),
        block_size=16,
    )
    words = case.trees.ancestor_words
    trees = build_tree_batch(rows[::2], words[::2], int(starts[-1]))
    chunked = in_chunks(trees, metadata)
    output = torch.zeros(case.query.shape)
    arguments = (case.query, case.kv_cache, metadata.block_table_tensor, chunked, case.scale)
    tree_attention(*arguments, output, kind)
    of_trees = np.r_[: int(starts[1]), int(starts[2]) : int(starts[3])]
    assert np.abs(output.numpy() - case.expected)[of_trees].max() < 1e-5

    described = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table_tensor)
    plain = plain_requests(Metadata(int(starts[-1]), 32, *described), chunked)
    assert plain.tokens == slice(int(starts[1]), int(starts[2]))
    assert plain.metadata.query_start_loc.tolist() == [0, 1, 33, 60]
    assert plain.metadata.seq_lens.tolist() == [32, 32, 27]
