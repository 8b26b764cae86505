"""The target model's own output layer, for heads that use it instead of their own."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from vllm_trie.drafts.drafter import DrafterContext
from vllm_trie.extras.heads.reading import CheckpointError

_NAMES = ("lm_head.weight", "model.embed_tokens.weight")
"""Tied output layers are stored as the embedding alone."""


def target_output_layer(target_model: nn.Module, context: DrafterContext) -> Tensor:
    """Return the target's output layer, [vocab_size, hidden_size], on the CPU.

    It comes from the loaded model; with tensor parallelism, where each rank holds a part, from the
    model's files.

    Raises:
        CheckpointError: Neither has it.
    """
    if context.tensor_parallel_size == 1:
        weight = getattr(getattr(target_model, "lm_head", None), "weight", None)
        # Quantized layers keep something else under this name, and vLLM's CPU kernels may have
        # packed the weight away.
        if (
            isinstance(weight, Tensor)
            and weight.is_floating_point()
            and weight.ndim == 2
            and weight.shape[0] >= context.vocab_size
            and weight.shape[1] == context.hidden_size
        ):
            return weight[: context.vocab_size].detach().cpu()  # vLLM pads the rows
    folder = _folder(context)
    layers = None if folder is None else _from_files(folder)
    if layers is not None:
        return layers
    raise CheckpointError(
        "these Medusa heads use the model's own output layer (original_lm_head), which was found "
        "neither in the loaded model nor in safetensors files of its folder or its "
        "download; add it to the heads' checkpoint as 'lm_head.weight'"
    )


def _folder(context: DrafterContext) -> Path | None:
    """Return the folder that a model's path or name stands for: by name, what vLLM has downloaded.
    None if there is no such folder."""
    model = context.model
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                revision=context.revision,
                cache_dir=context.download_dir,
                local_files_only=True,
            )
        )
    except (OSError, ValueError):
        return None


def _from_files(folder: Path) -> Tensor | None:
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    for name in _NAMES:
        file = folder / "model.safetensors"
        if index.is_file():
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name)
            if listed is None:
                continue
            file = folder / listed
        if not file.is_file():
            continue
        with safe_open(str(file), framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - not a mapping
                weight: Tensor = tensors.get_tensor(name)
                return weight
    return None
