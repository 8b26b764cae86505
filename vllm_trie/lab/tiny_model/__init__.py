"""Weights of the small real model that ships with the package, and of drafters for it.

Commit 311f483 of the repository has the code that made them, in `tools/tiny_model`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["FOLDER", "eagle_path", "medusa_path", "model_path"]

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "weights"
"""That of the model; :func:`model_path` makes sure of it."""


def _folder(name: str, made_by: str) -> Path:
    folder = _HERE / name
    for needed in ("config.json", "model.safetensors"):
        if not (folder / needed).is_file():
            raise FileNotFoundError(
                f"{folder / needed} is missing: this installation of vllm-trie lacks {made_by}. "
                "Install the wheel or a full checkout"
            )
    return folder


def model_path() -> Path:
    """Folder of the shipped model in Hugging Face format.

    Raises:
        FileNotFoundError: The weights are not installed.
    """
    return _folder(FOLDER.name, "the shipped model")


def medusa_path() -> Path:
    """Folder of the Medusa heads trained on the shipped model.

    Raises:
        FileNotFoundError: The heads are not installed.
    """
    return _folder("weights-medusa", "the shipped model's Medusa heads")


def eagle_path() -> Path:
    """Folder of the EAGLE head trained on the shipped model.

    Raises:
        FileNotFoundError: The head is not installed.
    """
    return _folder("weights-eagle", "the shipped model's EAGLE head")
