"""Checks of beam requests inside a catalogue."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_trie.beam import BeamOptions
from vllm_trie.items import ItemsError, ItemsHeader, file_stamp, read_header
from vllm_trie.vllm_hooks.frontend.beam_options import BeamRequestError
from vllm_trie.vllm_hooks.setup.config_keys import ITEMS, spelled
from vllm_trie.vllm_hooks.setup.items import catalogue_paths

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

_UNSET: dict[str, tuple[object, ...]] = {
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "min_tokens": (0,),
    "bad_words": (None, []),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logprobs": (None, 0),
}
"""Sampling parameters that do not go with items, and the values that mean unset."""


def check_parameters(vllm_config: VllmConfig, params: SamplingParams, options: BeamOptions) -> None:
    """Refuse a request for items that the engine does not have, or with what items exclude.

    Raises:
        BeamRequestError: Why it cannot be served.
    """
    if options.items is None:
        return
    names = catalogue_paths(vllm_config)
    if options.items not in names:
        known = ", ".join(map(repr, names)) or "none"
        raise BeamRequestError(
            f"beam search: items={options.items!r} is no catalogue of this engine, which has "
            f"{known}; name one of them, or start the engine with {spelled(ITEMS)}"
        )
    unset = dict(_UNSET)
    if options.items_end == "eos":
        unset["ignore_eos"] = (False,)
    for name, values in unset.items():
        if getattr(params, name) not in values:
            raise BeamRequestError(
                f"beam search: {name}={getattr(params, name)!r} is not supported with items; "
                "leave it out"
            )


def _header(path: Path) -> ItemsHeader | None:
    """Return the header of the newest version of a catalogue, None if it cannot be read."""
    try:
        return _read_header(path, file_stamp(path))
    except (ItemsError, OSError):
        return None


@functools.lru_cache(maxsize=64)
def _read_header(path: Path, stamp: tuple[int, ...]) -> ItemsHeader:
    return read_header(path)


def _check_ids(options: BeamOptions, header: ItemsHeader) -> None:
    kind = {"int": int, "str": str}[header.ids]
    for name in ("allow_items", "deny_items"):
        for each in (getattr(options, name) or ())[:1]:
            if not isinstance(each, kind):
                raise BeamRequestError(
                    f"beam search: {name} has {each!r}, the ids of {options.items!r} are of type "
                    f"{header.ids}; write them so"
                )


def check_length(
    vllm_config: VllmConfig, params: SamplingParams, options: BeamOptions, num_prompt_tokens: int
) -> None:
    """Refuse a request whose hypotheses would end before the longest item is complete.

    Raises:
        BeamRequestError: ``max_tokens`` or the room behind the prompt is too small, or the model
            has no EOS and the request wants one.
    """
    if options.items is None:
        return
    with_eos = options.items_end == "eos"
    if with_eos and params.eos_token_id is None:
        raise BeamRequestError(
            "beam search: items_end='eos' needs a model with an EOS token; use 'complete'"
        )
    header = _header(catalogue_paths(vllm_config)[options.items])
    if header is None:
        return  # the scheduler serves the version before, and checks the length, too
    _check_ids(options, header)
    needed = header.max_length + with_eos
    room = vllm_config.model_config.max_model_len - num_prompt_tokens
    if params.max_tokens is not None and params.max_tokens < needed:
        raise BeamRequestError(
            f"beam search: max_tokens must be at least {needed}, the longest item of "
            f"{options.items!r}{' and EOS' if with_eos else ''}, got {params.max_tokens}"
        )
    if room < needed:
        raise BeamRequestError(
            f"beam search: the longest item of {options.items!r} needs {needed} tokens, the "
            f"prompt of {num_prompt_tokens} tokens leaves {room}; shorten the prompt or start the "
            "engine with a larger max_model_len"
        )
