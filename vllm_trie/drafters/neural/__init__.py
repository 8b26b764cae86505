"""A trained drafter of vLLM's own as a part of a union."""

from vllm_trie.drafters.neural.drafter import Chains, NeuralDrafter
from vllm_trie.drafters.neural.options import NEURAL_METHODS, NeuralOptions

__all__ = ["NEURAL_METHODS", "Chains", "NeuralDrafter", "NeuralOptions"]
