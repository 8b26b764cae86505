"""Drafters with weights, in the checkpoint formats that vLLM loads: random ones for the shipped
model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_trie.lab.tiny_model import draft_model_path, model_path


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


def make_mtp_model(folder: Path) -> str:
    """Write the shipped draft model as a MiMo model with one MTP layer; returns its folder.

    The MTP layer is the model's only layer. It reads the next token's embedding and, much less, the
    hidden state, so that many drafts are right and all of them depend on both.
    """
    config = json.loads((draft_model_path() / "config.json").read_text()) | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # whose configuration it is, and which Transformers knows
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    size = config["hidden_size"]
    stored = load_file(draft_model_path() / "model.safetensors")
    weights = {name: tensor.float() for name, tensor in stored.items()}
    layer, mtp = "model.layers.0.", "model.mtp_layers.0."
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = len(weights[f"{layer}self_attn.{name}.weight"])
        weights[f"{layer}self_attn.{name}.bias"] = torch.zeros(rows)
    weights |= {
        mtp + name.removeprefix(layer): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(layer)
    }
    embeddings = weights["model.embed_tokens.weight"]
    random = torch.Generator().manual_seed(0)
    from_states = torch.randn(size, size, generator=random) * 0.03 * size**-0.5
    weights |= {
        "lm_head.weight": embeddings.clone(),
        f"{mtp}token_layernorm.weight": embeddings.pow(2).mean().sqrt().expand(size).clone(),
        f"{mtp}hidden_layernorm.weight": torch.ones(size),
        f"{mtp}input_proj.weight": torch.cat((from_states, torch.eye(size)), dim=1),
        f"{mtp}final_layernorm.weight": weights["model.norm.weight"].clone(),
    }
    return _save(folder, config, weights)


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
