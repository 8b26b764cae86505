"""Medusa drafting: heads on the target's hidden state guess the tokens of a dynamic tree."""

from vllm_trie.drafters.medusa.drafter import MedusaDrafter
from vllm_trie.drafters.medusa.options import MedusaOptions

__all__ = ["MedusaDrafter", "MedusaOptions"]
