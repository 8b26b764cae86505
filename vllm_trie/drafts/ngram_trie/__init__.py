"""The n-gram-trie drafter."""

from vllm_trie.drafts.ngram_trie.drafter import NgramTrieDrafter
from vllm_trie.drafts.ngram_trie.options import NgramTrieOptions

__all__ = ["NgramTrieDrafter", "NgramTrieOptions"]
