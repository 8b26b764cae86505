"""Reading of Medusa checkpoints in vLLM's and FasterDecoding's layouts.

The tensors' names decide which layout a file has, and their shapes how many heads and layers:
published configurations are known to disagree with their own weights.

vLLM: `model.safetensors` with the tensors `blocks.{head}.layers.{layer}.weight` (and `.bias`),
`lm_heads.{head}.weight` (`lm_head.weight` where the heads share it: `original_lm_head`) and
`token_map`; `config.json` of model type `medusa`. Reading brings all names to this layout.

FasterDecoding: `medusa_lm_head.pt` (or `.safetensors`) with the tensors
`{head}.{layer}.linear.weight`, `{head}.{layer}.linear.bias` and `{head}.{num_layers}.weight`;
`config.json` with `medusa_num_heads` and `medusa_num_layers`.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_trie.extras.heads.heads import HeadsShape, MedusaHeads
from vllm_trie.refusal import RefusedError

FILE_NAMES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
)
TEMPERATURES_KEY = "head_temperatures"
"""This project's key in `config.json`: one temperature a head."""
_PREFIXES = ("medusa_heads.", "medusa_head.", "medusa.")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class CheckpointError(RefusedError):
    """A Medusa checkpoint cannot be used; the message says why and what to do."""


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
    revision: str | None = None,
) -> Checkpoint:
    """Read heads in either layout.

    Args:
        path: A folder, a file of weights in it, or a repository's name on the Hugging Face hub.
        hidden_size, vocab_size: Of the target model, which the heads must fit.
        target_output: Returns the target's own output layer [vocab_size, hidden_size]; called only
            if the checkpoint says `original_lm_head` and does not hold that layer.
        revision: Of the repository: a branch, a tag or a commit.

    Raises:
        CheckpointError: Files are missing or damaged, or the heads do not fit the model.
    """
    folder, file = locate(path, revision)
    config = read_config(folder)
    tensors = {_vllm_name(name): value for name, value in read_tensors(file).items()}
    num_heads, num_layers = _num_heads_and_layers(tensors, config, file)
    token_map = _token_map(tensors.get("token_map"), config, vocab_size, file)
    if config.get("original_lm_head"):
        shared = tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight"))
        if shared is None and target_output is not None:
            shared = target_output()
        if shared is None:
            raise CheckpointError(
                f"{file} uses the model's own output layer (original_lm_head) without holding it"
            )
        tensors["lm_heads.0.weight"] = shared
    shape = HeadsShape(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_outputs=vocab_size if token_map is None else len(token_map),
        has_bias=any(re.fullmatch(r"blocks\..*\.bias", name) for name in tensors),
        shares_output=bool(config.get("original_lm_head")),
    )
    dtype = tensors.get("lm_heads.0.weight", torch.empty(0)).dtype
    heads = MedusaHeads(shape, dtype=dtype).requires_grad_(False)
    for name, target in parameters_of(heads):
        source = tensors.get(name)
        if source is None:
            raise CheckpointError(f"{file} lacks '{name}'; the file is incomplete")
        if token_map is not None and name.startswith("lm_heads") and len(source) == vocab_size:
            source = source[token_map]  # as vLLM does, keep the mapped rows of whole layers
        if source.shape != target.shape:
            raise CheckpointError(
                f"'{name}' in {file} has shape {tuple(source.shape)}, and the heads of this model "
                f"(hidden size {hidden_size}, {shape.num_outputs} tokens to guess among) have "
                f"{tuple(target.shape)}: these belong to another model or vocabulary"
            )
        target.copy_(source)
    heads.token_map = token_map
    return Checkpoint(heads, _temperatures(config, num_heads, folder))


def _vllm_name(name: str) -> str:
    """Return a tensor's name in vLLM's layout; names that are no head's stay as they are."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def parameters_of(heads: MedusaHeads) -> list[tuple[str, Tensor]]:
    """Return all weights with their names in vLLM's layout."""
    named = [(f"lm_heads.{i}.weight", output) for i, output in enumerate(heads.output_weight)]
    for kind, stacked in (("weight", heads.block_weight), ("bias", heads.block_bias)):
        for head, layers in enumerate(() if stacked is None else stacked):
            named += [(f"blocks.{head}.layers.{i}.{kind}", one) for i, one in enumerate(layers)]
    return named


def _num_heads_and_layers(
    tensors: Mapping[str, Tensor], config: dict[str, Any], file: Path
) -> tuple[int, int]:
    pattern = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
    pairs = [(int(m[1]), int(m[2])) for name in tensors if (m := pattern.fullmatch(name))]
    if not pairs:
        present = ", ".join(sorted(tensors)[:4])
        raise CheckpointError(
            f"{file} has no tensors of Medusa heads (it has {present}, ...); expected names like "
            "'blocks.0.layers.0.weight' (vLLM) or '0.0.linear.weight' (FasterDecoding)"
        )
    num_heads, num_layers = (1 + max(numbers) for numbers in zip(*pairs, strict=True))
    for key in ("num_heads", "medusa_num_heads"):
        stated = config.get(key)
        if isinstance(stated, int) and stated > num_heads:
            raise CheckpointError(
                f"config.json says {key}={stated}, but {file} holds {num_heads} heads; the file is "
                "incomplete"
            )
    return num_heads, num_layers


def _token_map(
    token_map: Tensor | None, config: dict[str, Any], vocab_size: int, file: Path
) -> Tensor | None:
    """Return the distinct tokens of the outputs, int64; None if they are all tokens."""
    size = config.get("truncated_vocab_size") or vocab_size
    if size >= vocab_size:
        return None  # as in vLLM, a map of the whole vocabulary is not used
    if token_map is None:
        raise CheckpointError(
            f"config.json says truncated_vocab_size={size}, but {file} has no token_map"
        )
    token_map = token_map.to(torch.int64)
    low, high = int(token_map.min()), int(token_map.max())
    if (
        token_map.shape != (size,)
        or not 0 <= low <= high < vocab_size
        or len(torch.unique(token_map)) != size
    ):
        raise CheckpointError(
            f"token_map in {file} must hold truncated_vocab_size={size} distinct tokens from 0 to "
            f"{vocab_size - 1}, found shape {tuple(token_map.shape)} with {low} to {high}"
        )
    return token_map


def _temperatures(config: dict[str, Any], num_heads: int, folder: Path) -> tuple[float, ...]:
    given = config.get(TEMPERATURES_KEY, [1.0] * num_heads)
    if not (
        isinstance(given, list)
        and len(given) >= num_heads
        and all(isinstance(value, int | float) and 0.05 <= value <= 20.0 for value in given)
    ):
        raise CheckpointError(
            f"config.json in {folder} says {TEMPERATURES_KEY}={given!r}; it must be a list of "
            f"{num_heads} numbers from 0.05 to 20, or be left out"
        )
    return tuple(float(value) for value in given[:num_heads])


def locate(path: str | Path, revision: str | None = None) -> tuple[Path, Path]:
    """Return the checkpoint's folder and its file of weights.

    Args:
        path: A folder, a file of weights in it, or a repository's name on the Hugging Face hub.
        revision: Of the repository.

    Raises:
        CheckpointError: There is no such file.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return given.parent, given
    if not given.is_dir():
        given = _download(str(path), revision)
    for name in FILE_NAMES:
        if (given / name).is_file():
            return given, given / name
    raise CheckpointError(
        f"model={str(path)!r} holds no Medusa heads: none of {', '.join(FILE_NAMES)} is there; "
        "give the folder of a checkpoint, such as `vllm-trie model-path --medusa` prints"
    )


def check_file(path: str) -> None:
    """Check that heads are there and their file is whole, from its header or directory.

    The name of a repository is not looked up.

    Raises:
        CheckpointError: There are none, or the file is truncated or of another kind.
    """
    if _REPOSITORY.fullmatch(path) and not Path(path).expanduser().exists():
        return
    folder, file = locate(path)
    read_config(folder)
    try:
        if file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(str(file), "pt"):
                pass
        else:
            with file.open("rb") as opened:
                if opened.read(2) == b"PK":  # older files are no archives
                    zipfile.ZipFile(opened).close()
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _download(name: str, revision: str | None) -> Path:
    if not _REPOSITORY.fullmatch(name):
        raise CheckpointError(
            f"model={name!r} is neither a folder nor the name of a repository; give the path of a "
            "Medusa checkpoint"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["config.json", *FILE_NAMES]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(
            f"model={name!r} is no folder here, and it could not be downloaded: {error}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `config.json`, empty if there is none.

    Raises:
        CheckpointError: It does not hold an object.
    """
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


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return all tensors of a file by name, on the CPU.

    Raises:
        CheckpointError: The file is damaged, or holds something else.
    """
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
