"""Reading and writing Medusa checkpoints in the two layouts that people have.

FasterDecoding's: `medusa_lm_head.pt` (or `.safetensors`), tensors `{head}.{layer}.linear.weight`,
`{head}.{layer}.linear.bias` and `{head}.{num_layers}.weight`; `config.json` with
`medusa_num_heads` and `medusa_num_layers`.

vLLM's: `model.safetensors`, tensors `blocks.{head}.layers.{layer}.weight`,
`lm_heads.{head}.weight` (`lm_head.weight` where the heads share it: `original_lm_head`) and
`token_map`; `config.json` of model type `medusa`.

The tensors' names decide which layout a file has, and their shapes how many heads and layers:
published configurations are known to disagree with their own weights.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_trie.drafters.medusa.heads import HeadsShape, MedusaHeads

FILE_NAMES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
)
TEMPERATURES_KEY = "head_temperatures"
"""Our key in `config.json`: one temperature a head."""

_PREFIXES = ("medusa_heads.", "medusa_head.", "medusa.")


class CheckpointError(ValueError):
    """A Medusa checkpoint cannot be used; the message says why and what to do."""


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
    folder, file = _locate(path)
    config = _read_config(folder)
    tensors = {_canonical_name(name): value for name, value in _read_tensors(file).items()}
    where = str(file)
    blocks = _collect_blocks(tensors, where)
    num_heads, num_layers = len(blocks), len(blocks[0])
    _check_count(config, ("num_heads", "medusa_num_heads"), num_heads, "heads", where)
    outputs = _collect_outputs(tensors, config, num_heads, target_output, where)
    token_map = _read_token_map(tensors, config, vocab_size, where)
    if token_map is not None:
        # vLLM, too, takes full output layers and keeps the mapped rows.
        rows = len(token_map)
        outputs = [o[token_map] if len(o) > rows and len(o) == vocab_size else o for o in outputs]
    expected_rows = vocab_size if token_map is None else len(token_map)
    for head, output in enumerate(outputs):
        _check_output(head, output, expected_rows, hidden_size, vocab_size, token_map, where)
    has_bias = f"blocks.0.layers.0.bias" in tensors  # noqa: F541
    shape = HeadsShape(
        num_heads,
        num_layers,
        hidden_size,
        vocab_size,
        expected_rows,
        has_bias,
        len(outputs) == 1 and num_heads > 1,
    )
    heads = MedusaHeads(shape, dtype=outputs[0].dtype)
    with torch.no_grad():
        for head, layers in enumerate(blocks):
            for layer, (weight, bias) in enumerate(layers):
                _check_block(head, layer, weight, bias, hidden_size, has_bias, where)
                heads.block_weight[head, layer].copy_(weight)
                if heads.block_bias is not None and bias is not None:
                    heads.block_bias[head, layer].copy_(bias)
        for head, output in enumerate(outputs):
            heads.output_weight[head].copy_(output)
    heads.token_map = token_map
    return Checkpoint(heads.requires_grad_(False), _temperatures(config, num_heads, where))


def save_vllm(
    heads: MedusaHeads,
    folder: Path,
    temperatures: tuple[float, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `model.safetensors` and `config.json` in vLLM's layout; `extra` goes into the
    latter."""
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
    tensors = {name: _stored(value, dtype) for name, value in tensors.items()}
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
        tensors["token_map"] = heads.token_map.to(torch.int64).contiguous()
        config["truncated_vocab_size"] = shape.num_outputs
    _write(folder, "model.safetensors", tensors, config, temperatures, extra)


def save_fasterdecoding(
    heads: MedusaHeads,
    folder: Path,
    temperatures: tuple[float, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    base_model: str = "",
    as_safetensors: bool = False,
) -> None:
    """Write `medusa_lm_head.pt` (or `.safetensors`) and `config.json` in FasterDecoding's layout.

    Raises:
        CheckpointError: the heads have a token map, which this layout does not know.
    """
    shape = heads.shape
    if heads.token_map is not None:
        raise CheckpointError(
            "FasterDecoding's layout has no token map; save these heads in vLLM's layout"
        )
    tensors: dict[str, Tensor] = {}
    for head in range(shape.num_heads):
        for layer in range(shape.num_layers):
            weight = heads.block_weight[head, layer]
            tensors[f"{head}.{layer}.linear.weight"] = weight
            # Its blocks always have a bias.
            bias = torch.zeros_like(weight[0])
            if heads.block_bias is not None:
                bias = heads.block_bias[head, layer]
            tensors[f"{head}.{layer}.linear.bias"] = bias
        output = heads.output_weight[0 if shape.shares_output else head]
        tensors[f"{head}.{shape.num_layers}.weight"] = output
    tensors = {name: _stored(value, dtype) for name, value in tensors.items()}
    config = {
        "medusa_num_heads": shape.num_heads,
        "medusa_num_layers": shape.num_layers,
        "base_model_name_or_path": base_model,
    }
    name = "medusa_lm_head.safetensors" if as_safetensors else "medusa_lm_head.pt"
    _write(folder, name, tensors, config, temperatures, None)


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    # A copy: safetensors refuses views of one storage.
    return value.detach().to("cpu", dtype, copy=True).contiguous()


def _write(
    folder: Path,
    name: str,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    temperatures: tuple[float, ...] | None,
    extra: Mapping[str, Any] | None,
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(tensors, str(folder / name), metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / name)
    (folder / name).chmod(0o644)
    if temperatures is not None:
        config[TEMPERATURES_KEY] = [round(value, 4) for value in temperatures]
    config |= extra or {}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _locate(path: str | Path) -> tuple[Path, Path]:
    """The checkpoint's folder and its file of weights."""
    given = Path(path).expanduser()
    if given.is_file():
        return given.parent, given
    if not given.is_dir():
        given = _download(str(path))
    for name in FILE_NAMES:
        if (given / name).is_file():
            return given, given / name
    raise CheckpointError(
        f"model={str(path)!r} holds no Medusa heads: none of {', '.join(FILE_NAMES)} is there; "
        "give the folder of a checkpoint, such as `vllm-trie model-path --medusa` prints"
    )


def _download(name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(
            f"model={name!r} is neither a folder nor the name of a repository; give the path of a "
            "Medusa checkpoint"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", *FILE_NAMES]))
    except Exception as error:
        raise CheckpointError(
            f"model={name!r} is no folder here, and it could not be downloaded: {error}"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold an object, found a {type(config).__name__}")
    return config


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(str(file))
        else:
            # Without weights_only a file of weights may run any code it carries.
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds more than tensors, so it is not read: it could run code. Convert it to "
            "safetensors where you trust it"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise CheckpointError(f"{file} must hold a mapping of names to tensors")
    return tensors


def _canonical_name(name: str) -> str:
    """The name in vLLM's layout; names that are no head's come back as they are."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name):
        return f"lm_heads.{match[1]}.weight"
    return name


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
