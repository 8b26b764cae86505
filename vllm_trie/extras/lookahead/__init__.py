"""The lookahead drafter: n-grams that the target model generates while it decodes."""

from vllm_trie.extras.lookahead.drafter import LookaheadDrafter
from vllm_trie.extras.lookahead.options import LookaheadOptions

__all__ = ["LookaheadDrafter", "LookaheadOptions"]
