"""Files of a checkpoint: found or downloaded, and read."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE_NAMES = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "pytorch_model.bin",
)
TEMPERATURES_KEY = "head_temperatures"
"""This project's key in `config.json`: one temperature a head."""


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class CheckpointError(ValueError):
    """A Medusa checkpoint cannot be used; the message says why and what to do."""


def locate(path: str | Path) -> tuple[Path, Path]:
    """Return the checkpoint's folder and its file of weights.

    Args:
        path: A folder, a file of weights in it, or a repository's name on the Hugging Face hub.

    Raises:
        CheckpointError: There is no such file.
    """
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


def _download(name: str) -> Path:
    if not _REPOSITORY.fullmatch(name):
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
