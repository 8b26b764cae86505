"""A Llama model with quantized weights, in the formats of checkpoints that vLLM reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_trie.lab.tiny_model import model_path

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_CONFIGS: dict[str, dict[str, Any]] = {
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    },
}


def write_quantized(folder: Path, kind: str) -> str:
    """Write the model with all weights of its linear layers quantized; returns the folder's path.

    Args:
        folder: an empty folder.
        kind: "int8" (weights per channel, activations per token), "gptq" or "awq" (4 bits).
    """
    source = model_path()
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if name.endswith("proj.weight"):
            stem = name.removesuffix("weight")
            parts = _int8(weight.float()) if kind == "int8" else _int4(weight.float(), kind)
            tensors |= {stem + part: tensor.contiguous() for part, tensor in parts.items()}
        else:
            tensors[name] = weight
    for file in (*source.glob("*.json"), *source.glob("*.jinja")):
        shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = _CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _int4(weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    """Eight values of 4 bits in an int32: along the input for GPTQ, along the output for AWQ."""
    num_outputs, num_inputs = weight.shape
    groups = weight.t().reshape(num_inputs // GROUP, GROUP, num_outputs)
    scales = groups.abs().amax(dim=1) / 7
    values = (groups / scales[:, None]).round().clamp(-8, 7) + 8
    values = values.reshape(num_inputs, num_outputs).to(torch.int64)
    # GPTQ stores the zero point less one.
    zeros = torch.full_like(scales, 7 if kind == "gptq" else 8, dtype=torch.int64)
    if kind == "gptq":
        group_of_input = torch.arange(num_inputs, dtype=torch.int32) // GROUP
        return {
            "qweight": _packed(values.t(), range(8)).t(),
            "qzeros": _packed(zeros, range(8)),
            "scales": scales.half(),
            "g_idx": group_of_input,
        }
    return {
        "qweight": _packed(values, _AWQ_ORDER),
        "qzeros": _packed(zeros, _AWQ_ORDER),
        "scales": scales.half(),
    }


def _packed(values: torch.Tensor, order: Any) -> torch.Tensor:
    """Rows of int64 values below 16 as int32, eight to one: place i holds value `order[i]`."""
    eights = values.reshape(values.shape[0], -1, 8)
    words = sum(eights[..., column] << 4 * place for place, column in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
