"""Reading of Medusa checkpoints in vLLM's and FasterDecoding's layouts.

The tensors' names decide which layout a file has, and their shapes how many heads and layers:
published configurations are known to disagree with their own weights.

vLLM: `model.safetensors` with the tensors `blocks.{head}.layers.{layer}.weight` (and `.bias`),
`lm_heads.{head}.weight` (`lm_head.weight` where the heads share it: `original_lm_head`) and
`token_map`; `config.json` of model type `medusa`. Reading brings all names to this layout.

FasterDecoding: `medusa_lm_head.pt` (or `.safetensors`) with the tensors
`{head}.{layer}.linear.weight`, `{head}.{layer}.linear.bias` and `{head}.{num_layers}.weight`;
`config.json` with `medusa_num_heads` and `medusa_num_layers`.
"""

from vllm_trie.drafters.medusa.checkpoint.files import (
    TEMPERATURES_KEY,
    CheckpointError,
    check_file,
)
from vllm_trie.drafters.medusa.checkpoint.loading import load_checkpoint

__all__ = ["TEMPERATURES_KEY", "CheckpointError", "check_file", "load_checkpoint"]
