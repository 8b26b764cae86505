"""Writing of checkpoints; see :mod:`vllm_trie.extras.heads.reading`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_trie.extras.heads.heads import MedusaHeads
from vllm_trie.extras.heads.reading import TEMPERATURES_KEY, parameters_of


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
    from safetensors.torch import save_file

    shape = heads.shape
    tensors = {
        name: _stored(value)
        for name, value in parameters_of(heads)
        if not (shape.shares_output and name.startswith("lm_heads."))
    }
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
        tensors["token_map"] = _stored(heads.token_map.to(torch.int64))
        config["truncated_vocab_size"] = shape.num_outputs
    if temperatures is not None:
        config[TEMPERATURES_KEY] = [round(value, 4) for value in temperatures]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _stored(value: Tensor) -> Tensor:
    # A copy: safetensors refuses views of one storage.
    kept = torch.bfloat16 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", kept, copy=True).contiguous()
