"""Training of Medusa heads on a frozen model."""

from __future__ import annotations

from vllm_trie.extras.heads.training.backbone import Backbone
from vllm_trie.extras.heads.training.text import Encoder, TokenRows, read_tokens
from vllm_trie.extras.heads.training.trainer import Trainer, TrainingPlan

__all__ = ["Backbone", "Encoder", "TokenRows", "Trainer", "TrainingPlan", "read_tokens"]
