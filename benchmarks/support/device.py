"""The device of a benchmark's engines: a CPU, or a GPU with `--device cuda`."""

from __future__ import annotations

import argparse
from typing import Any

CUDA_OPTIONS: dict[str, Any] = {
    # As vLLM comes: the model's dtype, compiled, with CUDA graphs.
    "dtype": "auto",
    "enforce_eager": False,
    # Several engines share the device, and each gets its KV cache by size. vLLM demands that this
    # share is free before it starts one.
    "gpu_memory_utilization": 0.05,
}


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: vLLM's defaults on an NVIDIA GPU, with the plugin allowed there",
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
    return dict(CUDA_OPTIONS) if options.device == "cuda" else {}
