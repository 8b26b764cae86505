"""Heads from a checkpoint in either layout, checked against the target model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_trie.drafters.medusa.checkpoint.fasterdecoding_layout import vllm_name
from vllm_trie.drafters.medusa.checkpoint.files import (
    TEMPERATURES_KEY,
    CheckpointError,
    locate,
    read_config,
    read_tensors,
)
from vllm_trie.drafters.medusa.checkpoint.vllm_layout import HeadTensors, collect_heads
from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads


@dataclass(frozen=True)
class Checkpoint:
    """Heads as read from disk.

    Attributes:
        heads: on the CPU, in the dtype of the file.
        temperatures: one a head, 1.0 where the checkpoint has none.
    """

    heads: MedusaHeads
    temperatures: tuple[float, ...]


def load_checkpoint(
    path: str | Path,
    hidden_size: int,
    vocab_size: int,
    target_output: Callable[[], Tensor] | None = None,
) -> Checkpoint:
    """Read heads in either layout.

    Args:
        path: a folder, a file of weights in it, or a repository's name on the Hugging Face hub.
        hidden_size, vocab_size: of the target model, which the heads must fit.
        target_output: returns the target's own output layer [vocab_size, hidden_size]; asked only
            if the checkpoint says `original_lm_head` and does not hold that layer.

    Raises:
        CheckpointError: files are missing or damaged, or the heads do not fit the model.
    """
    folder, file = locate(path)
    config = read_config(folder)
    tensors = {vllm_name(name): value for name, value in read_tensors(file).items()}
    where = str(file)
    parts = collect_heads(tensors, config, vocab_size, target_output, where)
    if parts.token_map is not None:
        # vLLM, too, takes full output layers and keeps the mapped rows.
        rows, outputs = len(parts.token_map), parts.outputs
        outputs = [
            o[parts.token_map] if len(o) > rows and len(o) == vocab_size else o for o in outputs
        ]
        parts = parts._replace(outputs=outputs)
    shape = _checked_shape(parts, hidden_size, vocab_size, where)
    return Checkpoint(_make_heads(parts, shape), _temperatures(config, shape.num_heads, where))


def _checked_shape(parts: HeadTensors, hidden_size: int, vocab_size: int, where: str) -> HeadsShape:
    """The shape of the heads; all parts have it, and it fits the target."""
    token_map = parts.token_map
    num_outputs = vocab_size if token_map is None else len(token_map)
    for head, output in enumerate(parts.outputs):
        _check_output(head, output, num_outputs, hidden_size, vocab_size, token_map, where)
    has_bias = parts.blocks[0][0][1] is not None
    for head, layers in enumerate(parts.blocks):
        for layer, (weight, bias) in enumerate(layers):
            _check_block(head, layer, weight, bias, hidden_size, has_bias, where)
    num_heads = len(parts.blocks)
    return HeadsShape(
        num_heads=num_heads,
        num_layers=len(parts.blocks[0]),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_outputs=num_outputs,
        has_bias=has_bias,
        shares_output=len(parts.outputs) == 1 and num_heads > 1,
    )


def _make_heads(parts: HeadTensors, shape: HeadsShape) -> MedusaHeads:
    """Heads with copies of the parts, not to be trained."""
    heads = MedusaHeads(shape, dtype=parts.outputs[0].dtype)
    with torch.no_grad():
        for head, layers in enumerate(parts.blocks):
            for layer, (weight, bias) in enumerate(layers):
                heads.block_weight[head, layer].copy_(weight)
                if heads.block_bias is not None and bias is not None:
                    heads.block_bias[head, layer].copy_(bias)
        for head, output in enumerate(parts.outputs):
            heads.output_weight[head].copy_(output)
    heads.token_map = parts.token_map
    return heads.requires_grad_(False)


def _check_output(
    head: int,
    output: Tensor,
    rows: int,
    hidden_size: int,
    vocab_size: int,
    token_map: Tensor | None,
    where: str,
) -> None:
    if output.ndim != 2 or output.shape[1] != hidden_size:
        raise CheckpointError(
            f"the output layer of head {head} in {where} has shape {tuple(output.shape)}, but the "
            f"model's hidden size is {hidden_size}: these heads belong to another model"
        )
    if output.shape[0] != rows:
        kind = "entries of token_map" if token_map is not None else "tokens of the model"
        raise CheckpointError(
            f"head {head} in {where} guesses among {output.shape[0]} tokens, but there are {rows} "
            f"{kind} (vocabulary of {vocab_size}): these heads were made for another vocabulary"
        )


def _check_block(
    head: int,
    layer: int,
    weight: Tensor,
    bias: Tensor | None,
    hidden_size: int,
    has_bias: bool,
    where: str,
) -> None:
    if weight.shape != (hidden_size, hidden_size):
        raise CheckpointError(
            f"block {layer} of head {head} in {where} has shape {tuple(weight.shape)}, but the "
            f"model's hidden size is {hidden_size}: these heads belong to another model"
        )
    if has_bias != (bias is not None) or (bias is not None and bias.shape != (hidden_size,)):
        found = None if bias is None else tuple(bias.shape)
        raise CheckpointError(
            f"the bias of block {layer} of head {head} in {where} is {found}; all blocks must "
            f"have one of shape ({hidden_size},), or none may"
        )


def _temperatures(config: Mapping[str, Any], num_heads: int, where: str) -> tuple[float, ...]:
    given = config.get(TEMPERATURES_KEY)
    if given is None:
        return (1.0,) * num_heads
    valid = (
        isinstance(given, list)
        and len(given) >= num_heads
        and all(isinstance(value, int | float) and 0.05 <= value <= 20.0 for value in given)
    )
    if not valid:
        raise CheckpointError(
            f"config.json beside {where} says {TEMPERATURES_KEY}={given!r}; it must be a list of "
            f"{num_heads} numbers from 0.05 to 20, or be left out"
        )
    return tuple(float(value) for value in given[:num_heads])
