"""Checks of requests inside a catalogue: beam requests, and ordinary ones that decode an item."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_trie.beam import ITEM_OPTIONS, OPTION_NAMES, BeamOptions, parse_options
from vllm_trie.items import ItemsError, ItemsHeader, Rules, read_header
from vllm_trie.vllm_hooks.frontend.beam_options import (
    DECODING_KEY,
    BeamRequestError,
    packed,
    refuse_misspelled,
    unpacked,
)
from vllm_trie.vllm_hooks.setup.config_keys import ITEMS, spelled
from vllm_trie.vllm_hooks.setup.items import catalogue_paths
from vllm_trie.watched_file import file_stamp

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

_UNSET: dict[str, tuple[object, ...]] = {
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "min_tokens": (0,),
    "bad_words": (None, []),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logprobs": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}
"""Sampling parameters that do not go with items, and the values that mean unset."""


_DECODING_OPTIONS = ITEM_OPTIONS - {"normalize", "weight_factor"} | {"detokenize"}

_UNSET_DECODING: dict[str, tuple[object, ...]] = {
    **{name: _UNSET[name] for name in ("stop", "stop_token_ids", "min_tokens", "bad_words")},
    "ignore_eos": (False,),
    "allowed_token_ids": _UNSET["allowed_token_ids"],
    "structured_outputs": _UNSET["structured_outputs"],
    "thinking_token_budget": (None,),
}


def asks_for_item(params: Any) -> bool:
    """Return whether an ordinary request with these parameters decodes an item."""
    return "items" in (getattr(params, "extra_args", None) or {})


def decodes_item(params: Any) -> bool:
    """Return whether a checked request decodes an item."""
    return DECODING_KEY in (getattr(params, "extra_args", None) or {})


def prepare_decoding(vllm_config: VllmConfig, params: SamplingParams) -> SamplingParams:
    """Check a request that decodes an item, and return a copy that the engine understands.

    Raises:
        BeamRequestError: The engine cannot serve it.
    """
    assert params.extra_args is not None
    extra_args = dict(params.extra_args)
    for name in sorted(extra_args.keys() & OPTION_NAMES - _DECODING_OPTIONS):
        raise BeamRequestError(f"{name} with items needs 'beam_width'; leave {name} out, or add it")
    given = {name: extra_args.pop(name) for name in _DECODING_OPTIONS & extra_args.keys()}
    refuse_misspelled(extra_args)
    try:
        options = parse_options({"beam_width": 1, **given})
    except ValueError as error:
        raise BeamRequestError(str(error)) from None
    if options.items is None:
        raise BeamRequestError("items=None names no catalogue; name one, or leave it out")
    if vllm_config.use_v2_model_runner:
        raise BeamRequestError(
            "items without 'beam_width' is not supported with Model Runner V2; add beam_width=1, "
            "which decodes greedily"
        )
    _check_catalogue(vllm_config, options.items)
    _check_unset(params, _UNSET_DECODING)
    prepared = params.clone()
    prepared.detokenize &= options.detokenize
    prepared.extra_args = {**extra_args, DECODING_KEY: packed(options)}
    return prepared


def check_decoding(vllm_config: VllmConfig, request: EngineCoreRequest) -> None:
    """Refuse a processed request whose item may not have the room that it needs.

    Raises:
        BeamRequestError: Why it cannot be served.
    """
    params, prompt = request.sampling_params, request.prompt_token_ids
    assert params is not None
    assert params.extra_args is not None
    if prompt is None:
        raise BeamRequestError("items: prompt embeddings are not supported; send token ids")
    if params.eos_token_id is None:
        raise BeamRequestError("items without 'beam_width' needs a model with an EOS token")
    options = unpacked(params.extra_args[DECODING_KEY])
    check_length(vllm_config, params, options, len(prompt))


def rules_of(options: BeamOptions) -> Rules:
    """Return what a request allows and denies."""
    return Rules(
        options.allow_items,
        options.allow_prefixes,
        options.deny_items or (),
        options.deny_prefixes or (),
    )


def _check_catalogue(vllm_config: VllmConfig, name: str) -> None:
    names = catalogue_paths(vllm_config)
    if name not in names:
        known = ", ".join(map(repr, names)) or "none"
        raise BeamRequestError(
            f"items={name!r} is no catalogue of this engine, which has {known}; name one of them, "
            f"or start the engine with {spelled(ITEMS)}"
        )


def _check_unset(params: SamplingParams, unset: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in unset.items():
        if getattr(params, name) not in values:
            raise BeamRequestError(
                f"{name}={getattr(params, name)!r} is not supported with items; leave it out"
            )


def check_parameters(vllm_config: VllmConfig, params: SamplingParams, options: BeamOptions) -> None:
    """Refuse a request for items that the engine does not have, or with what items exclude.

    Raises:
        BeamRequestError: Why it cannot be served.
    """
    if options.items is None:
        return
    _check_catalogue(vllm_config, options.items)
    unset = dict(_UNSET)
    if options.items_end == "eos":
        unset["ignore_eos"] = (False,)
    _check_unset(params, unset)


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
                    f"{name} has {each!r}, the ids of {options.items!r} are of type "
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
            f"max_tokens must be at least {needed}, the longest item of "
            f"{options.items!r}{' and EOS' if with_eos else ''}, got {params.max_tokens}"
        )
    if room < needed:
        raise BeamRequestError(
            f"the longest item of {options.items!r} needs {needed} tokens, the "
            f"prompt of {num_prompt_tokens} tokens leaves {room}; shorten the prompt or start the "
            "engine with a larger max_model_len"
        )
