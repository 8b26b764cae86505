"""Training of Medusa heads on a frozen model."""

from __future__ import annotations

from vllm_trie.lab.medusa.backbone import Backbone
from vllm_trie.lab.medusa.text import Encoder, TokenRows, read_tokens
from vllm_trie.lab.medusa.trainer import Trainer, TrainingPlan

__all__ = ["Backbone", "Encoder", "TokenRows", "Trainer", "TrainingPlan", "read_tokens"]
