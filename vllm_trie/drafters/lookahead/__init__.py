"""The lookahead drafter: n-grams that the target model generates while it decodes."""

from vllm_trie.drafters.lookahead.drafter import LookaheadDrafter
from vllm_trie.drafters.lookahead.options import LookaheadOptions

__all__ = ["LookaheadDrafter", "LookaheadOptions"]
