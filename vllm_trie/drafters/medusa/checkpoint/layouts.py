"""The two layouts of checkpoints: names of tensors, and writing.

vLLM: `model.safetensors` with the tensors `blocks.{head}.layers.{layer}.weight` (and `.bias`),
`lm_heads.{head}.weight` (`lm_head.weight` where the heads share it: `original_lm_head`) and
`token_map`; `config.json` of model type `medusa`. Reading brings all names to this layout.

FasterDecoding: `medusa_lm_head.pt` (or `.safetensors`) with the tensors
`{head}.{layer}.linear.weight`, `{head}.{layer}.linear.bias` and `{head}.{num_layers}.weight`;
`config.json` with `medusa_num_heads` and `medusa_num_layers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_trie.drafters.medusa.checkpoint.files import CheckpointError, write_checkpoint
from vllm_trie.drafters.medusa.heads import MedusaHeads

_PREFIXES = ("medusa_heads.", "medusa_head.", "medusa.")


def vllm_name(name: str) -> str:
    """Return a tensor's name in vLLM's layout; names that are no head's stay as they are."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


def save_vllm(
    heads: MedusaHeads,
    folder: Path,
    temperatures: tuple[float, ...] | None = None,
) -> None:
    """Write `model.safetensors`, in bfloat16, and `config.json`.

    An output layer that the heads share is the target's own, and left out.

    Args:
        folder: made if it is missing.
        temperatures: one a head; left out of the configuration if None.
    """
    shape = heads.shape
    tensors: dict[str, Tensor] = {}
    for head, layer, weight, bias in _blocks(heads):
        tensors[f"blocks.{head}.layers.{layer}.weight"] = weight
        if bias is not None:
            tensors[f"blocks.{head}.layers.{layer}.bias"] = bias
    if not shape.shares_output:
        for head, output in enumerate(heads.output_weight):
            tensors[f"lm_heads.{head}.weight"] = output
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "medusa_fc_bias": shape.has_bias,
        "dtype": "bfloat16",
    }
    if shape.shares_output:
        config["original_lm_head"] = True
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map.to(torch.int64)
        config["truncated_vocab_size"] = shape.num_outputs
    write_checkpoint(folder / "model.safetensors", tensors, config, temperatures)


def save_fasterdecoding(
    heads: MedusaHeads,
    folder: Path,
    temperatures: tuple[float, ...] | None = None,
    base_model: str = "",
) -> None:
    """Write `medusa_lm_head.pt`, in bfloat16, and `config.json`.

    Args:
        folder, temperatures: as in :func:`save_vllm`.
        base_model: name of the target model, for the configuration.

    Raises:
        CheckpointError: the heads have a token map, which this layout lacks.
    """
    shape = heads.shape
    if heads.token_map is not None:
        raise CheckpointError(
            "FasterDecoding's layout has no token map; save these heads in vLLM's layout"
        )
    tensors: dict[str, Tensor] = {}
    for head, layer, weight, bias in _blocks(heads):
        tensors[f"{head}.{layer}.linear.weight"] = weight
        if bias is None:
            bias = torch.zeros_like(weight[0])  # this layout's blocks always have one
        tensors[f"{head}.{layer}.linear.bias"] = bias
    for head, output in enumerate(heads.output_weight.expand(shape.num_heads, -1, -1)):
        tensors[f"{head}.{shape.num_layers}.weight"] = output
    config = {
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": base_model,
    }
    write_checkpoint(folder / "medusa_lm_head.pt", tensors, config, temperatures)


def _blocks(heads: MedusaHeads) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
    """Yield head, layer, weight and bias of each residual block."""
    biases = heads.block_bias
    for head, weights in enumerate(heads.block_weight):
        for layer, weight in enumerate(weights):
            yield head, layer, weight, None if biases is None else biases[head, layer]
