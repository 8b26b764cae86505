"""Reading and writing of Medusa checkpoints in vLLM's and FasterDecoding's layouts.

The tensors' names decide which layout a file has, and their shapes how many heads and layers:
published configurations are known to disagree with their own weights.
"""

from __future__ import annotations

from vllm_trie.drafters.medusa.checkpoint.files import CheckpointError, check_file
from vllm_trie.drafters.medusa.checkpoint.layouts import save_fasterdecoding, save_vllm
from vllm_trie.drafters.medusa.checkpoint.loading import Checkpoint, load_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "check_file",
    "load_checkpoint",
    "save_fasterdecoding",
    "save_vllm",
]
