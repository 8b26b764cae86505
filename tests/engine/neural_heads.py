"""Drafters with weights, in the checkpoint formats that vLLM loads: random ones for the shipped
model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_trie.tiny_model import model_path


def make_eagle_head(folder: Path, method: str = "eagle") -> str:
    """Write an EAGLE or EAGLE-3 head of one layer with random weights; returns its folder."""
    config = _config(num_hidden_layers=1)
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    eagle3 = method == "eagle3"
    read = 2 * size if eagle3 else size
    layer = "midlayer." if eagle3 else "layers.0."
    shapes = {
        "fc.weight": (size, 3 * size if eagle3 else 2 * size),
        f"{layer}self_attn.q_proj.weight": (heads, read),
        f"{layer}self_attn.k_proj.weight": (kv, read),
        f"{layer}self_attn.v_proj.weight": (kv, read),
        f"{layer}self_attn.o_proj.weight": (size, heads),
        f"{layer}mlp.gate_proj.weight": (inner, size),
        f"{layer}mlp.up_proj.weight": (inner, size),
        f"{layer}mlp.down_proj.weight": (size, inner),
    }
    random = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=random) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    norms = ["post_attention_layernorm"]
    norms += ["hidden_norm", "input_layernorm"] if eagle3 else []
    weights |= {f"{layer}{name}.weight": torch.ones(size) for name in norms}
    if eagle3:
        vocab = config["vocab_size"]
        weights |= {
            "norm.weight": torch.ones(size),
            "lm_head.weight": _target_weights()["model.embed_tokens.weight"].float(),
        }
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": vocab,
            # vLLM's defaults coincide in a model of five layers.
            "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        }
    return _save(folder, config, weights)


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
