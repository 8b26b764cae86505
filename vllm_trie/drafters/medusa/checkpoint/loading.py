"""Heads from a checkpoint in either layout, checked against the target model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_trie.drafters.medusa.checkpoint.files import (
    TEMPERATURES_KEY,
    CheckpointError,
    locate,
    read_config,
    read_tensors,
)
from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads

_PREFIXES = ("medusa_heads.", "medusa_head.", "medusa.")


def _vllm_name(name: str) -> str:
    """Return a tensor's name in vLLM's layout; names that are no head's stay as they are."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


class Checkpoint(NamedTuple):
    """Heads as read from disk."""

    heads: MedusaHeads
    """On the CPU, in the dtype of the file."""
    temperatures: tuple[float, ...]
    """One a head, 1.0 where the checkpoint has none."""


def load_checkpoint(
    path: str | Path,
    hidden_size: int,
    vocab_size: int,
    target_output: Callable[[], Tensor] | None = None,
) -> Checkpoint:
    """Read heads in either layout.

    Args:
        path: A folder, a file of weights in it, or a repository's name on the Hugging Face hub.
        hidden_size, vocab_size: Of the target model, which the heads must fit.
        target_output: Returns the target's own output layer [vocab_size, hidden_size]; called only
            if the checkpoint says `original_lm_head` and does not hold that layer.

    Raises:
        CheckpointError: Files are missing or damaged, or the heads do not fit the model.
    """
    reader = _Reader(path, hidden_size, vocab_size)
    blocks = reader.blocks()
    outputs = reader.outputs(len(blocks), target_output)
    token_map = reader.token_map()
    if token_map is not None:
        # As vLLM does, take full output layers and keep the mapped rows.
        full = [len(output) == vocab_size > len(token_map) for output in outputs]
        outputs = [o[token_map] if whole else o for o, whole in zip(outputs, full, strict=True)]
    reader.check_outputs(outputs, token_map)
    reader.check_blocks(blocks)
    shape = HeadsShape(
        num_heads=len(blocks),
        num_layers=len(blocks[0]),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_outputs=len(outputs[0]),
        has_bias=blocks[0][0][1] is not None,
        shares_output=len(outputs) == 1 and len(blocks) > 1,
    )
    heads = MedusaHeads(shape, dtype=outputs[0].dtype).requires_grad_(False)
    for head, layers in enumerate(blocks):
        for layer, (weight, bias) in enumerate(layers):
            heads.block_weight[head, layer].copy_(weight)
            if heads.block_bias is not None and bias is not None:
                heads.block_bias[head, layer].copy_(bias)
    for head, output in enumerate(outputs):
        heads.output_weight[head].copy_(output)
    heads.token_map = token_map
    return Checkpoint(heads, reader.temperatures(len(blocks)))


_Block = tuple[Tensor, Tensor | None]
"""Weight and bias."""


class _Reader:
    """The tensors and the configuration of one checkpoint, and the size of the target model."""

    def __init__(self, path: str | Path, hidden_size: int, vocab_size: int) -> None:
        folder, file = locate(path)
        self._config = read_config(folder)
        self._tensors = {_vllm_name(name): value for name, value in read_tensors(file).items()}
        self._where = str(file)
        self._hidden_size = hidden_size
        self._vocab_size = vocab_size

    def blocks(self) -> list[list[_Block]]:
        """Return the residual blocks of each head."""
        pattern = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
        pairs = [(int(m[1]), int(m[2])) for name in self._tensors if (m := pattern.fullmatch(name))]
        if not pairs:
            present = ", ".join(sorted(self._tensors)[:4])
            raise CheckpointError(
                f"{self._where} has no tensors of Medusa heads (it has {present}, ...); expected "
                "names like 'blocks.0.layers.0.weight' (vLLM) or '0.0.linear.weight' "
                "(FasterDecoding)"
            )
        num_heads, num_layers = (1 + max(numbers) for numbers in zip(*pairs, strict=True))
        names = [
            [f"blocks.{head}.layers.{layer}" for layer in range(num_layers)]
            for head in range(num_heads)
        ]
        needed = [f"{name}.weight" for layers in names for name in layers]
        if missing := [name for name in needed if name not in self._tensors]:
            raise CheckpointError(
                f"{self._where} lacks {', '.join(missing[:4])}; the file is incomplete"
            )
        for key in ("num_heads", "medusa_num_heads"):
            stated = self._config.get(key)
            if isinstance(stated, int) and stated > num_heads:
                raise CheckpointError(
                    f"config.json says {key}={stated}, but {self._where} holds {num_heads} heads; "
                    "the file is incomplete"
                )
        tensors = self._tensors
        return [
            [(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name in layers]
            for layers in names
        ]

    def outputs(self, num_heads: int, target_output: Callable[[], Tensor] | None) -> list[Tensor]:
        """Return the output layer of each head, or a single one that all share."""
        tensors = self._tensors
        if self._config.get("original_lm_head"):
            for name in ("lm_head.weight", "lm_heads.0.weight"):
                if name in tensors:
                    return [tensors[name]]
            if target_output is None:
                raise CheckpointError(
                    f"{self._where} uses the model's own output layer (original_lm_head) without "
                    "holding it"
                )
            return [target_output()]
        names = [f"lm_heads.{head}.weight" for head in range(num_heads)]
        for head, name in enumerate(names):
            if name not in tensors:
                raise CheckpointError(
                    f"{self._where} lacks the output layer of head {head} ('{name}'), and "
                    "config.json does not say original_lm_head"
                )
        return [tensors[name] for name in names]

    def token_map(self) -> Tensor | None:
        """Return the distinct tokens of the outputs, int64; None if they are all tokens."""
        truncated = self._config.get("truncated_vocab_size") or self._vocab_size
        token_map = self._tensors.get("token_map")
        if token_map is None and truncated < self._vocab_size:
            raise CheckpointError(
                f"config.json says truncated_vocab_size={truncated}, but {self._where} has no "
                "token_map"
            )
        if token_map is None or truncated >= self._vocab_size:
            return None  # as in vLLM, a map of the whole vocabulary is not used
        token_map = token_map.to(torch.int64)
        if token_map.ndim != 1 or len(token_map) != truncated:
            raise CheckpointError(
                f"token_map in {self._where} has shape {tuple(token_map.shape)}; config.json says "
                f"truncated_vocab_size={truncated}"
            )
        low, high = int(token_map.min()), int(token_map.max())
        if low < 0 or high >= self._vocab_size or len(torch.unique(token_map)) != truncated:
            raise CheckpointError(
                f"token_map in {self._where} must hold distinct tokens from 0 to "
                f"{self._vocab_size - 1}, found {low} to {high}"
            )
        return token_map

    def temperatures(self, num_heads: int) -> tuple[float, ...]:
        """Return the temperature of each head."""
        given = self._config.get(TEMPERATURES_KEY)
        if given is None:
            return (1.0,) * num_heads
        valid = (
            isinstance(given, list)
            and len(given) >= num_heads
            and all(isinstance(value, int | float) and 0.05 <= value <= 20.0 for value in given)
        )
        if not valid:
            raise CheckpointError(
                f"config.json next to {self._where} says {TEMPERATURES_KEY}={given!r}; it must be "
                f"a list of {num_heads} numbers from 0.05 to 20, or be left out"
            )
        return tuple(float(value) for value in given[:num_heads])

    def check_outputs(self, outputs: list[Tensor], token_map: Tensor | None) -> None:
        """Check the shapes of the output layers."""
        num_outputs = self._vocab_size if token_map is None else len(token_map)
        for head, output in enumerate(outputs):
            if output.ndim != 2 or output.shape[1] != self._hidden_size:
                raise CheckpointError(
                    f"the output layer of head {head} in {self._where} has shape "
                    f"{tuple(output.shape)}, but the model's hidden size is {self._hidden_size}: "
                    "these heads belong to another model"
                )
            if len(output) != num_outputs:
                kind = "tokens of the model" if token_map is None else "entries of token_map"
                raise CheckpointError(
                    f"head {head} in {self._where} guesses among {len(output)} tokens, but there "
                    f"are {num_outputs} {kind} (vocabulary of {self._vocab_size}): these heads "
                    "were made for another vocabulary"
                )

    def check_blocks(self, blocks: list[list[_Block]]) -> None:
        """Check the shapes of the residual blocks; all have a bias or none has."""
        size, has_bias = self._hidden_size, blocks[0][0][1] is not None
        for head, layers in enumerate(blocks):
            for layer, (weight, bias) in enumerate(layers):
                if weight.shape != (size, size):
                    raise CheckpointError(
                        f"block {layer} of head {head} in {self._where} has shape "
                        f"{tuple(weight.shape)}, but the model's hidden size is {size}: these "
                        "heads belong to another model"
                    )
                shape = None if bias is None else tuple(bias.shape)
                if shape != ((size,) if has_bias else None):
                    raise CheckpointError(
                        f"the bias of block {layer} of head {head} in {self._where} is {shape}; "
                        f"all blocks must have one of shape ({size},), or none may"
                    )
