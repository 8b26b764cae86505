"""The device of a benchmark's engines: a CPU, or a GPU with `--device cuda`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

CUDA_OPTIONS: dict[str, Any] = {
    # As vLLM comes: the model's dtype, compiled, with CUDA graphs.
    "dtype": "auto",
    "enforce_eager": False,
    # Several engines share the device, and each gets its KV cache by size. vLLM demands that this
    # share is free before it starts one.
    "gpu_memory_utilization": 0.05,
}
DUMMY_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
"""Hugging Face's configuration of Llama 3 8B."""


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device` and `--load-format`."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: vLLM's defaults on an NVIDIA GPU, with the plugin allowed there",
    )
    parser.add_argument(
        "--load-format",
        default="auto",
        help="of vLLM; 'dummy' gives random weights: the cost of a step, not of a text",
    )


def check_device(device: str) -> None:
    """Exit with a message if vLLM does not run on the device; imports vLLM."""
    from vllm.platforms import current_platform

    if device != current_platform.device_type:
        raise SystemExit(
            f"--device {device}: this vLLM runs on {current_platform.device_type!r}; "
            "for 'cuda' install vLLM's CUDA build on a machine with an NVIDIA GPU"
        )


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an engine on the device that the command line names."""
    device = CUDA_OPTIONS if options.device == "cuda" else {}
    return {**device, "load_format": options.load_format}


def write_dummy_model(folder: Path) -> Path:
    """Write a model without weights, for `--load-format dummy`: :data:`DUMMY_SHAPE` with the
    tokenizer of the model that ships."""
    from vllm_trie.lab.tiny_model import model_path

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DUMMY_SHAPE, indent=1) + "\n", encoding="utf-8")
    for path in model_path().glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)
    return folder
