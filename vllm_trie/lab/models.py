"""The model that a command runs, and the Medusa heads that ship for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from vllm_trie.lab import smollm2, tiny_model
from vllm_trie.lab.local_engine import without_memory

_WITH_HEADS = ("medusa_dynamic", "trie_union")


def model_or_shipped(model: str | None) -> str:
    """Return a model's name or folder; that of the model that ships for None.

    Raises:
        typer.BadParameter: This build has none, or `smollm2` cannot be fetched.
    """
    if model is not None and model != smollm2.NAME:
        return model
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return str(tiny_model.model_path() if model is None else smollm2.fetch())
    except (FileNotFoundError, smollm2.FetchError) as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None


def is_shipped(model: str) -> bool:
    """Return whether this is the folder of the model that ships."""
    return Path(model).resolve() == tiny_model.FOLDER


def shipped_heads(model: str) -> str | None:
    """Return the folder of the heads that ship for a model; None if none do."""
    if is_shipped(model):
        return str(tiny_model.medusa_path())
    return str(smollm2.medusa_path()) if Path(model).name == smollm2.FOLDER_NAME else None


def speculative_config(method: str, model: str, nodes: int) -> dict[str, Any]:
    """Return a method's options for runs that are compared, on a model.

    Raises:
        typer.BadParameter: The method needs heads, and none ship for the model.
    """
    config = {"method": method, "num_speculative_tokens": nodes, **without_memory(method)}
    if method in _WITH_HEADS:
        config["model"] = shipped_heads(model)
        if config["model"] is None:
            raise typer.BadParameter(
                f"{method!r} needs heads of the model, which ship for {smollm2.NAME!r} and for the "
                "shipped model only",
                param_hint="--method",
            )
    return config
