"""vLLM's layout: the names of tensors that all others are brought to.

`model.safetensors` with the tensors `blocks.{head}.layers.{layer}.weight` (and `.bias`),
`lm_heads.{head}.weight` (`lm_head.weight` where the heads share it: `original_lm_head`) and
`token_map`; `config.json` of model type `medusa`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_trie.drafters.medusa.checkpoint.files import CheckpointError, write_checkpoint
from vllm_trie.drafters.medusa.heads import MedusaHeads


class HeadTensors(NamedTuple):
    """The parts of heads as a checkpoint holds them; nothing is said of their shapes yet.

    Attributes:
        blocks: weight and bias of each head's layers.
        outputs: output layer of each head, or a single one that all share.
        token_map: int64, distinct tokens of the target; None without one.
    """

    blocks: list[list[tuple[Tensor, Tensor | None]]]
    outputs: list[Tensor]
    token_map: Tensor | None


def collect_heads(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    vocab_size: int,
    target_output: Callable[[], Tensor] | None,
    where: str,
) -> HeadTensors:
    """Find the parts of all heads among a checkpoint's tensors.

    Args:
        tensors: by their name in this layout.
        config: of the checkpoint.
        vocab_size: of the target model.
        target_output: returns the target's own output layer, asked only if it is needed.
        where: the file, for messages.

    Raises:
        CheckpointError: a part is missing, or the token map is none.
    """
    blocks = _collect_blocks(tensors, where)
    _check_count(config, ("num_heads", "medusa_num_heads"), len(blocks), "heads", where)
    outputs = _collect_outputs(tensors, config, len(blocks), target_output, where)
    return HeadTensors(blocks, outputs, _read_token_map(tensors, config, vocab_size, where))


def save_vllm(
    heads: MedusaHeads,
    folder: Path,
    temperatures: tuple[float, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json`.

    Args:
        heads: what to write.
        folder: made if it is missing.
        temperatures: one a head; left out of the configuration if None.
        dtype: of the heads' tensors in the file.
        extra: more keys for the configuration.
    """
    shape = heads.shape
    tensors: dict[str, Tensor] = {}
    for head in range(shape.num_heads):
        for layer in range(shape.num_layers):
            name = f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = heads.block_weight[head, layer]
            if heads.block_bias is not None:
                tensors[f"{name}.bias"] = heads.block_bias[head, layer]
        if not shape.shares_output:
            tensors[f"lm_heads.{head}.weight"] = heads.output_weight[head]
    if shape.shares_output:
        tensors["lm_head.weight"] = heads.output_weight[0]
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "medusa_fc_bias": shape.has_bias,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if shape.shares_output:
        config["original_lm_head"] = True
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map.to(torch.int64)
        config["truncated_vocab_size"] = shape.num_outputs
    config |= extra or {}
    write_checkpoint(folder, "model.safetensors", tensors, dtype, config, temperatures)


def _collect_blocks(
    tensors: Mapping[str, Tensor], where: str
) -> list[list[tuple[Tensor, Tensor | None]]]:
    """Weight and bias of each head's layers."""
    pattern = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
    found = {(int(m[1]), int(m[2])) for name in tensors if (m := pattern.fullmatch(name))}
    if not found:
        names = ", ".join(sorted(tensors)[:4])
        raise CheckpointError(
            f"{where} has no tensors of Medusa heads (it has {names}, ...); expected names like "
            "'blocks.0.layers.0.weight' (vLLM) or '0.0.linear.weight' (FasterDecoding)"
        )
    num_heads = 1 + max(head for head, _ in found)
    num_layers = 1 + max(layer for _, layer in found)
    missing = [
        f"blocks.{head}.layers.{layer}.weight"
        for head in range(num_heads)
        for layer in range(num_layers)
        if (head, layer) not in found
    ]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing[:4])}; the file is incomplete")

    def layer_of(head: int, layer: int) -> tuple[Tensor, Tensor | None]:
        name = f"blocks.{head}.layers.{layer}"
        return tensors[f"{name}.weight"], tensors.get(f"{name}.bias")

    return [[layer_of(h, layer) for layer in range(num_layers)] for h in range(num_heads)]


def _check_count(
    config: Mapping[str, Any], keys: tuple[str, ...], found: int, what: str, where: str
) -> None:
    for key in keys:
        stated = config.get(key)
        if isinstance(stated, int) and stated > found:
            raise CheckpointError(
                f"config.json says {key}={stated}, but {where} holds {found} {what}; the file is "
                "incomplete"
            )


def _collect_outputs(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    num_heads: int,
    target_output: Callable[[], Tensor] | None,
    where: str,
) -> list[Tensor]:
    """The output layers: one a head, or a single one that all share."""
    if config.get("original_lm_head"):
        for name in ("lm_head.weight", "lm_heads.0.weight"):
            if name in tensors:
                return [tensors[name]]
        if target_output is None:
            raise CheckpointError(
                f"{where} uses the model's own output layer (original_lm_head) without holding it"
            )
        return [target_output()]
    missing = [h for h in range(num_heads) if f"lm_heads.{h}.weight" not in tensors]
    if missing:
        raise CheckpointError(
            f"{where} lacks the output layer of head {missing[0]} "
            f"('lm_heads.{missing[0]}.weight'), and config.json does not say original_lm_head"
        )
    return [tensors[f"lm_heads.{head}.weight"] for head in range(num_heads)]


def _read_token_map(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], vocab_size: int, where: str
) -> Tensor | None:
    truncated = config.get("truncated_vocab_size") or vocab_size
    token_map = tensors.get("token_map")
    if token_map is None:
        if truncated < vocab_size:
            raise CheckpointError(
                f"config.json says truncated_vocab_size={truncated}, but {where} has no token_map"
            )
        return None
    if truncated >= vocab_size:
        return None  # as in vLLM, a map of the whole vocabulary is not used
    token_map = token_map.to(torch.int64)
    if token_map.ndim != 1 or len(token_map) != truncated:
        raise CheckpointError(
            f"token_map in {where} has shape {tuple(token_map.shape)}; config.json says "
            f"truncated_vocab_size={truncated}"
        )
    low, high = int(token_map.min()), int(token_map.max())
    if low < 0 or high >= vocab_size or len(token_map.unique()) != truncated:
        raise CheckpointError(
            f"token_map in {where} must hold distinct tokens from 0 to {vocab_size - 1}, found "
            f"{low} to {high}"
        )
    return token_map
