"""The n-gram-trie drafter."""

from vllm_trie.drafters.ngram_trie.drafter import NgramTrieDrafter
from vllm_trie.drafters.ngram_trie.options import NgramTrieOptions

__all__ = ["NgramTrieDrafter", "NgramTrieOptions"]
