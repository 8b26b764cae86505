"""A draft model for the shipped model, in the format that vLLM loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_trie.lab.tiny_model import model_path


def make_draft_model(folder: Path, num_layers: int = 1) -> str:
    """Write the shipped model's first layers as a draft model; returns its folder."""
    weights = {
        name: tensor
        for name, tensor in _target_weights().items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    return _save(folder, _config(num_hidden_layers=num_layers), weights)


def _target_weights() -> dict[str, torch.Tensor]:
    return load_file(model_path() / "model.safetensors")


def _config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_path() / "config.json").read_text())
    return config | changes


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return str(folder)
