"""Writing of checkpoints; see :mod:`vllm_trie.extras.heads.reading`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_trie.extras.heads.heads import MedusaHeads
from vllm_trie.extras.heads.reading import TEMPERATURES_KEY


def save_vllm(
    heads: MedusaHeads,
    folder: Path,
    temperatures: tuple[float, ...] | None = None,
) -> None:
    """Write `model.safetensors`, in bfloat16, and `config.json`.

    An output layer that the heads share is the target's own, and left out.

    Args:
        folder: Made if it is missing.
        temperatures: One a head; left out of the configuration if None.
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


def _blocks(heads: MedusaHeads) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
    """Yield head, layer, weight and bias of each residual block."""
    biases = heads.block_bias
    for head, weights in enumerate(heads.block_weight):
        for layer, weight in enumerate(weights):
            yield head, layer, weight, None if biases is None else biases[head, layer]


def write_checkpoint(
    file: Path,
    tensors: Mapping[str, Tensor],
    config: dict[str, Any],
    temperatures: tuple[float, ...] | None,
) -> None:
    """Write tensors to a file in safetensors, and `config.json` next to it.

    The folder is made if it is missing. Floating-point tensors are stored in bfloat16, others keep
    their dtype. The temperatures, one a head, are added to the configuration.
    """
    from safetensors.torch import save_file

    stored = {key: _stored(value) for key, value in tensors.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(stored, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    if temperatures is not None:
        config[TEMPERATURES_KEY] = [round(value, 4) for value in temperatures]
    text = json.dumps(config, indent=2) + "\n"
    (file.parent / "config.json").write_text(text, encoding="utf-8")


def _stored(value: Tensor) -> Tensor:
    # A copy: safetensors refuses views of one storage.
    kept = torch.bfloat16 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", kept, copy=True).contiguous()
