"""Random batches over a paged cache, and what attention must give for them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from tests.oracles.attention import tree_attention_in_torch
from vllm_trie.attention import (
    FULL_ATTENTION,
    AttentionKind,
    TreeBatch,
    TreeRow,
    build_tree_batch,
    split_cache,
)
from vllm_trie.attention.cache_layout import slot_elements
from vllm_trie.tree import TokenTree

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPU backend takes."""


class RequestShape(NamedTuple):
    computed: int
    """Tokens of earlier steps."""
    committed: int
    """Causal tokens of this step."""
    num_nodes: int


@dataclass(frozen=True)
class PagedCase:
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    trees: TreeBatch
    scale: float
    largest_value: float
    kind: AttentionKind = FULL_ATTENTION

    @cached_property
    def expected(self) -> np.ndarray:
        """float64 [num_tokens, num_heads, head_size]."""
        output = torch.zeros(self.query.shape, dtype=torch.float64)
        tree_attention_in_torch(
            self.query.double(),
            self.kv_cache.double(),
            self.block_table,
            self.trees,
            self.scale,
            output,
            self.kind,
        )
        return output.numpy()


def laid_out(kv_cache: torch.Tensor, isa: str) -> torch.Tensor:
    """A cache of `vec` as another of vLLM's kernels lays it out."""
    if isa == "vec":
        return kv_cache
    _, _, block_size, double_head_size = kv_cache.shape
    of_vec, of_isa = (
        slot_elements(name, block_size, double_head_size // 2) for name in ("vec", isa)
    )
    result = torch.empty_like(kv_cache)
    result.flatten(2)[:, :, of_isa] = kv_cache.flatten(2)[:, :, of_vec]
    return result


def attention_kind(
    num_heads: int,
    window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
) -> AttentionKind:
    """A kind of attention with sinks and slopes that matter."""
    return AttentionKind(
        window,
        chunk,
        soft_cap,
        torch.linspace(-2.0, 6.0, num_heads) if sinks else None,
        2.0 ** -torch.linspace(0.5, 8, num_heads) if alibi else None,
    )


def random_tree(generator: np.random.Generator, num_nodes: int, chain: bool = False) -> TokenTree:
    """A tree whose shape ranges from a chain to a star; token ids do not matter here."""
    reach = int(generator.integers(1, num_nodes + 1)) if num_nodes else 1
    parents = [
        node - 1 if chain else max(-1, node - int(generator.integers(1, reach + 1)))
        for node in range(num_nodes)
    ]
    return TokenTree.from_lists(list(range(num_nodes)), parents)


def paged_case(
    requests: Sequence[RequestShape],
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    seed: int,
    chains: bool = False,
    kind: AttentionKind = FULL_ATTENTION,
) -> PagedCase:
    """A batch with these shapes and standard normal values; slots not in use hold NaN, and blocks
    that no query sees are gone.

    The query is a view of a wider tensor, as vLLM's is of the projected q, k and v.
    """
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).to(dtype)

    seq_lens = [sum(request) for request in requests]
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    free = generator.permutation(sum(blocks_of) + 2).astype(np.int32)
    shape = (len(free), num_kv_heads, block_size, 2 * head_size)
    kv_cache = torch.full(shape, torch.nan, dtype=dtype)
    keys, values = split_cache(kv_cache)
    block_table = np.full((len(requests), max(blocks_of) + 1), free[-1], dtype=np.int32)
    rows, words, start, largest = [], [], 0, 0.0
    for index, (request, seq_len) in enumerate(zip(requests, seq_lens, strict=True)):
        mine, free = free[: blocks_of[index]], free[blocks_of[index] :]
        block_table[index, : len(mine)] = mine
        position = np.arange(seq_len)
        block, offset = mine[position // block_size], position % block_size
        value = normal(seq_len, num_kv_heads, head_size)
        keys[block, :, :, offset] = normal(seq_len, num_kv_heads, head_size)
        values[block, :, offset] = value
        largest = max(largest, float(value.abs().max()))
        first = max(0, request.computed - kind.window + 1) if kind.window else 0
        if kind.chunk:
            first = max(first, request.computed // kind.chunk * kind.chunk)
        block_table[index, : first // block_size] = block_table[index, -1]
        num_queries = request.committed + request.num_nodes
        tree = random_tree(generator, request.num_nodes, chains)
        rows.append(TreeRow(index, start, num_queries, request.num_nodes, seq_len))
        words.append(tree.ancestor_words())
        start += num_queries
    query = normal(start, num_heads + 2 * num_kv_heads, head_size)[:, :num_heads]
    return PagedCase(
        query,
        kv_cache,
        torch.from_numpy(block_table),
        build_tree_batch(rows, words, start),
        head_size**-0.5,
        largest,
        kind,
    )
