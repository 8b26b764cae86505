"""Checks of beam requests inside a catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_trie.beam import BeamOptions
from vllm_trie.items import ItemsError, read_header
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
    try:
        header = read_header(catalogue_paths(vllm_config)[options.items])
    except ItemsError:
        return  # the scheduler serves the version before, and checks the length, too
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
