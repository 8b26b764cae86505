"""A trained drafter of vLLM's own as a part of a union."""

from vllm_trie.extras.union.neural.drafter import Chains, NeuralDrafter
from vllm_trie.extras.union.neural.options import NEURAL_METHODS, NeuralOptions

__all__ = ["NEURAL_METHODS", "Chains", "NeuralDrafter", "NeuralOptions"]
