"""Checks of the ``extra_args`` (over HTTP ``vllm_xargs``) of every request.

vLLM carries all of them to the workers, and leaves it to others to read them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_trie.beam import ITEM_OPTIONS, OPTION_NAMES
from vllm_trie.vllm_hooks.frontend.beam_options import (
    OTHER_NAMES,
    SIMILAR,
    BeamRequestError,
    asks_for_beam,
)
from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT, SPECULATION, TRACE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MAX_SIZE = 262_144
"""Largest size of a key that nobody is known to read, characters and numbers."""

_OWN = OPTION_NAMES | {SPECULATION, TRACE, CACHE_SALT}
_MISSPELLED = ("beam_width", "items", SPECULATION, TRACE)
"""Keys that work alone: misspelled, they would be ignored."""
_OF_VLLM = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Keys that vLLM fills from fields of their own."""


def check_extra_args(vllm_config: VllmConfig, params: Any, processors: list[str]) -> None:
    """Refuse extra arguments that are too large, and beam options without ``beam_width``.

    An engine with custom logits processors may read keys of any name and size: there, only the
    plugin's own keys have a limit, and options without ``beam_width`` pass.

    Args:
        vllm_config: Of the engine.
        params: Parameters of any request, as the user gave them.
        processors: Names of the engine's custom logits processors.

    Raises:
        BeamRequestError: Naming the key, its size or value, what is allowed and what to do.
    """
    extra_args: Mapping[str, Any] = getattr(params, "extra_args", None) or {}
    if not extra_args:
        return
    others_read = bool(processors or vllm_config.kv_transfer_config)
    for name, value in extra_args.items():
        if name in _OF_VLLM or (others_read and name not in _OWN):
            continue
        if (size := _size(name) + _size(value)) > MAX_SIZE:
            raise BeamRequestError(
                f"extra_args[{name[:80]!r}] has a size of {size}, at most {MAX_SIZE} (characters "
                "and numbers) are allowed where no custom logits processor reads it; leave it out"
            )
    # A request for items has a check of its own.
    if not processors and not asks_for_beam(params) and "items" not in extra_args:
        _refuse_without_width(extra_args)


def _refuse_without_width(extra_args: Mapping[str, Any]) -> None:
    """Refuse what would be ignored: the request would be decoded without a beam search."""
    for name, value in extra_args.items():
        if name in OPTION_NAMES:
            needed = "items" if name in ITEM_OPTIONS else "beam_width"
            raise BeamRequestError(
                f"beam search: {name}={value!r:.200} needs {needed!r}; add it, or leave {name} out"
            )
        if name in OTHER_NAMES:
            raise BeamRequestError(f"beam search: {name!r} is unknown; use {OTHER_NAMES[name]}")
        if name in _OWN:
            continue
        for meant in difflib.get_close_matches(name[:40], _MISSPELLED, n=1, cutoff=SIMILAR):
            raise BeamRequestError(f"extra_args[{name!r}] is unknown; did you mean {meant!r}?")


def _size(value: Any) -> int:
    """Return the characters and numbers of a value; containers are followed."""
    size, pending = 0, [value]
    while pending and size <= MAX_SIZE:
        item = pending.pop()
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            size += len(item) if len(item) > MAX_SIZE else 0
            pending += item
        else:
            size += 1
    return size
