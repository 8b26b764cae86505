"""Tree-masked attention over a paged KV cache."""

from __future__ import annotations

from vllm_trie.attention.cpu_cache import move_slots, split_cache
from vllm_trie.attention.paged import tree_attention
from vllm_trie.attention.reference import tree_attention_reference
from vllm_trie.attention.tree_batch import TreeBatch, TreeRow, build_tree_batch

__all__ = [
    "TreeBatch",
    "TreeRow",
    "build_tree_batch",
    "move_slots",
    "split_cache",
    "tree_attention",
    "tree_attention_reference",
]
