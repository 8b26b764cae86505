"""Random LoRA adapters for the shipped model, and the model with an adapter merged in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from vllm_trie.lab.tiny_model import model_path

RANK = 4


def make_adapters(folder: Path, count: int) -> list[LoRARequest]:
    """Return adapters, made in `folder`; `merged-1` is the model with the first one merged in."""
    made = []
    for number in range(1, count + 1):
        adapter, merged = folder / f"adapter-{number}", folder / f"merged-{number}"
        adapter.mkdir()
        merged.mkdir()
        _make_adapter(adapter, merged, seed=number)
        made.append(LoRARequest(adapter.name, number, str(adapter)))
    return made


def _make_adapter(adapter: Path, merged: Path, seed: int) -> None:
    """Write the adapter in PEFT's format to `adapter` and the merged model to `merged`."""
    source = Path(model_path())
    weights = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    low_rank: dict[str, torch.Tensor] = {}
    names = [name for name in weights if name.endswith(("q_proj.weight", "v_proj.weight"))]
    for name in names:
        weight = weights[name].float()
        down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
        up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
        module = f"base_model.model.{name.removesuffix('.weight')}"
        low_rank[f"{module}.lora_A.weight"] = down
        low_rank[f"{module}.lora_B.weight"] = up
    for name in weights:
        weights[name] = weights[name].float()
    for name in names:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        weights[name] += low_rank[f"{module}.lora_B.weight"] @ low_rank[f"{module}.lora_A.weight"]
    save_file(low_rank, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": RANK,
                "lora_alpha": RANK,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
            }
        )
    )
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, merged / file.name)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
