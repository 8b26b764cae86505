"""N-grams and one source of heads in one tree."""

from vllm_trie.extras.union.drafter import TrieUnionDrafter
from vllm_trie.extras.union.options import TrieUnionOptions

__all__ = ["TrieUnionDrafter", "TrieUnionOptions"]
