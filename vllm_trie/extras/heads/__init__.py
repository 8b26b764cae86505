"""Medusa drafting: heads on the target's hidden state guess the tokens of a dynamic tree."""

from vllm_trie.extras.heads.drafter import MedusaDrafter
from vllm_trie.extras.heads.options import MedusaOptions

__all__ = ["MedusaDrafter", "MedusaOptions"]
