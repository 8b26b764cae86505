"""A trained drafter of vLLM's own as a part of a union."""

from __future__ import annotations

from vllm_trie.drafters.neural.drafter import Chains, ChainSource, NeuralDrafter
from vllm_trie.drafters.neural.options import NEURAL_METHODS, NeuralOptions

__all__ = ["NEURAL_METHODS", "ChainSource", "Chains", "NeuralDrafter", "NeuralOptions"]
