"""The union of several drafters: their candidates in one tree under one node budget."""

from vllm_trie.extras.union.drafter import TrieUnionDrafter
from vllm_trie.extras.union.options import TrieUnionOptions

__all__ = ["TrieUnionDrafter", "TrieUnionOptions"]
