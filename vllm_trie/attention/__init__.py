"""Tree-masked attention over a paged KV cache."""

from vllm_trie.attention.cache_layout import move_slots, split_cache
from vllm_trie.attention.kernels import choose_kernels, move_slots_in_layers, tree_attention
from vllm_trie.attention.kind import FULL_ATTENTION, AttentionKind
from vllm_trie.attention.tree_batch import TreeBatch, TreeRow, build_tree_batch

__all__ = [
    "FULL_ATTENTION",
    "AttentionKind",
    "TreeBatch",
    "TreeRow",
    "build_tree_batch",
    "choose_kernels",
    "move_slots",
    "move_slots_in_layers",
    "split_cache",
    "tree_attention",
]
