"""Catalogues that an engine serves, from ``additional_config["vllm_trie"]["items"]``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.items.trie_file import check_vocabulary, read_header
from vllm_trie.vllm_hooks.setup.config_keys import ITEMS, own_part, spelled
from vllm_trie.vllm_hooks.setup.support import reason_off, reason_sampler_selects

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def catalogue_paths(vllm_config: VllmConfig) -> dict[str, Path]:
    """Return the files of the engine's catalogues by name, empty if it has none."""
    given = own_part(vllm_config.additional_config).get(ITEMS, {})
    return {name: Path(path) for name, path in given.items()}


def check_catalogues(vllm_config: VllmConfig) -> None:
    """Refuse catalogues that the engine cannot serve; reads their headers.

    Raises:
        ValueError: Native beam search is off, the engine has something that constrained rows do
            not go with, or a file is missing, damaged, or has tokens outside the vocabulary.
    """
    paths = catalogue_paths(vllm_config)
    if not paths:
        return
    reason = reason_off(vllm_config)
    if reason is None and (setting := reason_sampler_selects(vllm_config)):
        reason = f"{setting} samples without the constraint; leave one of them out"
    if reason is not None:
        raise ValueError(f"{spelled(ITEMS)} cannot be served: {reason}")
    for path in paths.values():
        vocab_size = vllm_config.model_config.get_vocab_size()
        check_vocabulary(path, read_header(path), vocab_size)
