"""Reading and writing Medusa checkpoints in the two layouts that people have.

The tensors' names decide which layout a file has, and their shapes how many heads and layers:
published configurations are known to disagree with their own weights. A module each:

- `files`: a checkpoint's files, whatever is in them;
- `vllm_layout`: vLLM's names of tensors, the ones that all others are brought to;
- `fasterdecoding_layout`: FasterDecoding's names;
- `loading`: heads that are checked against the target model.
"""

from __future__ import annotations

from vllm_trie.drafters.medusa.checkpoint.fasterdecoding_layout import save_fasterdecoding
from vllm_trie.drafters.medusa.checkpoint.files import CheckpointError
from vllm_trie.drafters.medusa.checkpoint.loading import Checkpoint, load_checkpoint
from vllm_trie.drafters.medusa.checkpoint.vllm_layout import save_vllm

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "load_checkpoint",
    "save_fasterdecoding",
    "save_vllm",
]
