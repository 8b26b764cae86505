"""The catalogues of an engine, as it is configured."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.extras.items.trie_file import (
    ItemsError,
    check_tokenizer,
    check_vocabulary,
    read_header,
)
from vllm_trie.files.tokenizers import fingerprint, load_tokenizer
from vllm_trie.hooks.start.additional_config import own_part, spelled
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.refusal import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ITEMS = "items"
"""Key of the engine's catalogues, name to path, and the option of requests that names one."""


def catalogue_paths(vllm_config: VllmConfig) -> dict[str, Path]:
    """Return the files of the engine's catalogues by name, empty if it has none.

    Raises:
        RefusedError: They are not paths by name.
    """
    given = own_part(vllm_config.additional_config).get(ITEMS, {})
    if not isinstance(given, Mapping) or any(
        not isinstance(text, str) or not text for pair in given.items() for text in pair
    ):
        raise RefusedError(
            f"{spelled(ITEMS)}={given!r} must map names to paths, as in {{'catalogue': 'PATH'}}"
        )
    return {name: Path(path) for name, path in given.items()}


@functools.cache
def _tokenizer_print(name: str, revision: str | None, trust_remote_code: bool) -> str | None:
    """Return the fingerprint of a tokenizer, None if it cannot be loaded."""
    try:
        return fingerprint(load_tokenizer(name, revision, trust_remote_code).vocabulary)
    except ValueError:
        return None


def check_catalogues(vllm_config: VllmConfig) -> None:
    """Refuse catalogues that the engine cannot serve; reads their headers.

    Raises:
        RefusedError: Native beam search is off, or a file is missing, damaged, has tokens outside
            the vocabulary, or was built with another tokenizer.
    """
    paths = catalogue_paths(vllm_config)
    if not paths:
        return
    reason = reason_off(vllm_config)
    if reason is not None:
        raise RefusedError(f"{spelled(ITEMS)} cannot be served: {reason}")
    model_config = vllm_config.model_config
    vocab_size = model_config.get_vocab_size()
    for name, path in paths.items():
        try:
            header = read_header(path)
            check_vocabulary(path, header, vocab_size)
            if header.tokenizer is not None and not model_config.skip_tokenizer_init:
                tokenizer = _tokenizer_print(
                    model_config.tokenizer,
                    model_config.tokenizer_revision,
                    model_config.trust_remote_code,
                )
                check_tokenizer(path, header.tokenizer, tokenizer, "the model's")
        except ItemsError as error:
            raise ItemsError(f"{spelled(ITEMS)}[{name!r}] is an unusable file: {error}") from None
