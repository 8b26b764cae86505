"""Trained drafters for the shipped model, in the formats that vLLM loads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_trie.lab.tiny_model import model_path


def make_draft_model(folder: Path) -> str:
    """Write the shipped model's first three layers as a draft model; returns its folder."""
    weights = {
        name: tensor
        for name, tensor in _target_weights().items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < 3
    }
    return _save(folder, _config(num_hidden_layers=3), weights)


def make_eagle3(folder: Path) -> str:
    """Write an EAGLE-3 head whose layer has random weights; returns its folder."""
    config = _config(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=_config()["vocab_size"],
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
    )
    size = config["hidden_size"]
    weights = _random_layer("midlayer.", config, 2 * size)
    weights["midlayer.hidden_norm.weight"] = weights["norm.weight"] = torch.ones(size)
    weights["fc.weight"] = torch.randn(size, 3 * size) / (3 * size) ** 0.5
    return _save(folder, config, {**weights, "lm_head.weight": _embeddings()})


def make_dflash(
    folder: Path,
    settings: Mapping[str, Any] = {},
    shapes: Mapping[str, Sequence[int]] = {},
    **changes: Any,
) -> str:
    """Write a DFlash drafter of two layers with random weights; returns its folder.

    Args:
        folder: Of the checkpoint.
        settings: More of its `dflash_config`.
        shapes: Of more weights.
        changes: Of the other settings.
    """
    config = _config(
        **{
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "num_target_layers": _config()["num_hidden_layers"],
            "layer_types": ["full_attention"] * 2,
            "block_size": 16,
            "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 3], **settings},
            **changes,
        }
    )
    size, weights = config["hidden_size"], {}
    for layer in range(2):
        weights |= _random_layer(f"layers.{layer}.", config, size)
        for name in ("q_norm", "k_norm"):
            weights[f"layers.{layer}.self_attn.{name}.weight"] = torch.ones(config["head_dim"])
    weights["hidden_norm.weight"] = weights["norm.weight"] = torch.ones(size)
    weights["fc.weight"] = torch.randn(size, 3 * size) / (3 * size) ** 0.5
    if rank := config.get("markov_rank"):
        head = _embeddings()[::2]
        weights |= {"lm_head.weight": head, "d2t": torch.arange(len(head))}
        weights["markov_head.markov_w1.weight"] = torch.randn(config["vocab_size"], rank)
        weights["markov_head.markov_w2.weight"] = torch.randn(len(head), rank)
    return _save(folder, config, weights | _random(shapes))


def make_dspark(folder: Path) -> str:
    """Write a DSpark drafter: DFlash's with a Markov head, for every other token; returns its
    folder."""
    size = _config()["vocab_size"] // 2
    return make_dflash(
        folder, architectures=["Qwen3DSparkModel"], markov_rank=8, draft_vocab_size=size
    )


def make_dflash2(folder: Path) -> str:
    """Write a DFlash2 drafter, whose candidates' scores go by the token before; returns its
    folder."""
    config = _config()
    settings = {"selector_rank": 8, "selector_top_k": 4}
    shapes = {
        "candidate_selector.predecessor_codebook": (config["vocab_size"], 8),
        "candidate_selector.successor_codebook": (config["vocab_size"], 8),
        "candidate_selector.hidden_projection.weight": (8, config["hidden_size"]),
    }
    return make_dflash(
        folder,
        {**settings, **CONVOLUTIONS},
        {**shapes, **_convolutions(config["hidden_size"])},
        architectures=["DFlash2DraftModel"],
    )


def make_lilicorr(folder: Path) -> str:
    """Write a LiLiCorr drafter, whose scores go by the target's last state, too; returns its
    folder."""
    size = _config()["hidden_size"]
    settings = {
        f"lilicorr_{name}": value
        for name, value in {
            "hidden_size": size,
            "candidate_topk": 8,
            "num_heads": 1,
            "num_layers": 0,
            "mlp_ratio": 1,
            "factor_dim": 8,
            "vector_eps": 1e-6,
            "logit_scale": 32.0,
        }.items()
    }
    shapes: dict[str, Sequence[int]] = {
        "slot_embedding": (1, 1, 15, 1, size),
        "rank_embedding": (1, 1, 1, 8, size),
        "relative_slot_bias": (1, 31),
        "same_slot_bias": (1,),
        "output_norm.weight": (size,),
        "anchor_norm.weight": (size,),
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
    }
    for name, shape in {
        "pass_hidden_proj": (size, size),
        "context_proj": (size, size),
        "feature_mlp.up_proj": (size, 5),
        "feature_mlp.down_proj": (size, size),
        "factor_input_proj": (size, 3 * size),
        "in_head": (8, size),
        "out_head": (8, size),
        "anchor_out_head": (8, size),
    }.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return make_dflash(
        folder,
        {**settings, **CONVOLUTIONS},
        {**{f"lilicorr.{name}": shapes[name] for name in shapes}, **_convolutions(size)},
        architectures=["LiLiCorrDraftModel"],
    )


CONVOLUTIONS = {"conv_kernel_size": 3, "conv_group_size": 32}


def _convolutions(size: int) -> dict[str, Sequence[int]]:
    """Return the shapes of the convolutions around the layers of a DFlash2 drafter."""
    taps, group = CONVOLUTIONS.values()
    shapes = {
        "base_kernel": (2, taps, size),
        "kernel_projection.weight": (2 * taps * size // group, size),
    }
    return {
        f"layers.{layer}.{part}_conv.{name}": shape
        for layer in range(2)
        for part in ("attention", "mlp")
        for name, shape in shapes.items()
    }


def make_mtp(folder: Path) -> str:
    """Write ERNIE's MTP layer with random weights; returns its folder."""
    config = _config(
        architectures=["Ernie4_5_MoeForCausalLM"],
        model_type="ernie4_5_moe",
        num_hidden_layers=1,
        num_nextn_predict_layers=1,
        use_bias=False,
    )
    size = config["hidden_size"]
    weights = _random_layer("model.mtp_block.0.", config, size)
    for name in ("emb", "hidden"):
        weights[f"model.mtp_{name}_norm.0.weight"] = torch.ones(size)
    weights["model.mtp_linear_proj.0.weight"] = torch.randn(size, 2 * size) / (2 * size) ** 0.5
    return _save(folder, config, {**weights, "model.embed_tokens.weight": _embeddings()})


def _random_layer(prefix: str, config: dict[str, Any], input_size: int) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama layer whose attention reads `input_size` values."""
    torch.manual_seed(0)
    size, inner = config["hidden_size"], config["intermediate_size"]
    width, kv_width = (
        config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "self_attn.q_proj": (width, input_size),
        "self_attn.k_proj": (kv_width, input_size),
        "self_attn.v_proj": (kv_width, input_size),
        "self_attn.o_proj": (size, width),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    weights = _random(shapes)
    weights |= {name: torch.ones(size) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"{prefix}{name}.weight": weight for name, weight in weights.items()}


def _random(shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(*shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def _target_weights() -> dict[str, torch.Tensor]:
    return load_file(model_path() / "model.safetensors")


def _embeddings() -> torch.Tensor:
    return _target_weights()["model.embed_tokens.weight"]


def _config(**changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_path() / "config.json").read_text())
    return config | changes


def _save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors"
    )
    return str(folder)


RANDOM = {
    "dflash": make_dflash,
    "dflash2": make_dflash2,
    "dspark": make_dspark,
    "eagle3": make_eagle3,
    "lilicorr": make_lilicorr,
    "mtp": make_mtp,
}
"""Makers of drafters with random weights, by vLLM's name of their speculator."""
