"""FasterDecoding's layout.

`medusa_lm_head.pt` (or `.safetensors`) with the tensors `{head}.{layer}.linear.weight`,
`{head}.{layer}.linear.bias` and `{head}.{num_layers}.weight`; `config.json` with
`medusa_num_heads` and `medusa_num_layers`.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from vllm_trie.drafters.medusa.checkpoint.files import CheckpointError, write_checkpoint
from vllm_trie.drafters.medusa.heads import MedusaHeads

_PREFIXES = ("medusa_heads.", "medusa_head.", "medusa.")


def vllm_name(name: str) -> str:
    """A tensor's name in vLLM's layout; names that are no head's come back as they are."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


def save_fasterdecoding(
    heads: MedusaHeads,
    folder: Path,
    temperatures: tuple[float, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    base_model: str = "",
    as_safetensors: bool = False,
) -> None:
    """Write `medusa_lm_head.pt` (or `.safetensors`) and `config.json`.

    Args:
        heads: what to write.
        folder: made if it is missing.
        temperatures: one a head; left out of the configuration if None.
        dtype: of the tensors in the file.
        base_model: name of the target model, for the configuration.
        as_safetensors: not as `.pt`.

    Raises:
        CheckpointError: the heads have a token map, which this layout does not know.
    """
    shape = heads.shape
    if heads.token_map is not None:
        raise CheckpointError(
            "FasterDecoding's layout has no token map; save these heads in vLLM's layout"
        )
    tensors: dict[str, Tensor] = {}
    for head in range(shape.num_heads):
        for layer in range(shape.num_layers):
            weight = heads.block_weight[head, layer]
            tensors[f"{head}.{layer}.linear.weight"] = weight
            # Its blocks always have a bias.
            bias = torch.zeros_like(weight[0])
            if heads.block_bias is not None:
                bias = heads.block_bias[head, layer]
            tensors[f"{head}.{layer}.linear.bias"] = bias
        output = heads.output_weight[0 if shape.shares_output else head]
        tensors[f"{head}.{shape.num_layers}.weight"] = output
    config = {
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": base_model,
    }
    name = "medusa_lm_head.safetensors" if as_safetensors else "medusa_lm_head.pt"
    write_checkpoint(folder, name, tensors, dtype, config, temperatures)
