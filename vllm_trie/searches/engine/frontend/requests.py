"""Beam requests: every check of them.

:func:`prepare_request` checks what the user gave and returns what the engine gets,
:func:`check_processed` checks the processed request.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.sampling_params import SamplingParams

from vllm_trie.extras.items import ItemsError, ItemsHeader, read_header
from vllm_trie.files.watched_file import file_stamp
from vllm_trie.hooks.frontend.extra_args import (
    check_extra_args,
    custom_processors,
    refuse_misplaced,
    refuse_misspelled,
    refusing_what_fails,
)
from vllm_trie.hooks.frontend.request_options import option_keys
from vllm_trie.hooks.start.additional_config import ITEMS, spelled
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.hooks.wire import (
    CACHE_SALT,
    SPEC_KEY,
    beam_spec,
    extra_args_of,
    packed,
)
from vllm_trie.searches import OPTION_NAMES, BeamOptions, parse_options
from vllm_trie.searches.engine.beam_support import (
    BeamRequestError,
    beam_slots,
    catalogue_paths,
    check_blocks,
    check_inputs,
    check_slots,
    unsupported_rule,
)
from vllm_trie.searches.settings import MAX_RULES, shown

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreRequest

# -- sampling parameters ---------------------------------------------------------------------------

_Allows = Callable[[Any], bool]
_BEAMS, _ITEMS = "with beam_width", "with items"


class _Rule(NamedTuple):
    """What a kind of request may have of some sampling parameters."""

    requests: str
    names: str
    allows: _Allows
    advice: str = "leave it out"


def _one_of(*values: object) -> _Allows:
    return lambda value: value in values


def _at_least(least: float) -> _Allows:
    return lambda value: value is None or value >= least


def _is_short(value: Any) -> bool:
    return len(value or ()) <= MAX_RULES


def _is_finite(value: Mapping[int, float] | None) -> bool:
    return all(math.isfinite(bias) for bias in (value or {}).values())


# fmt: off
_RULES = (
    _Rule(_BEAMS, "repetition_penalty", _at_least(1.0), "use a value of at least 1"),
    _Rule(_BEAMS, "presence_penalty frequency_penalty logprobs", _at_least(0.0),
        "use a value of at least 0"),
    _Rule(_BEAMS, "min_p", _one_of(None, 0.0)),
    _Rule(_BEAMS, "prompt_logprobs logprob_token_ids repetition_detection thinking_token_budget",
        _one_of(None)),
    _Rule(_BEAMS, "bad_words stop stop_token_ids logit_bias", _is_short,
        f"use at most {MAX_RULES} entries"),
    _Rule(_BEAMS, "logit_bias", _is_finite,
        "use finite numbers; allowed_token_ids forbids tokens"),
    _Rule(_ITEMS, "stop stop_token_ids bad_words", _one_of(None, [])),
    _Rule(_ITEMS, "min_tokens", _one_of(0)),
    _Rule(_ITEMS, "repetition_penalty", _one_of(1.0)),
    _Rule(_ITEMS, "presence_penalty frequency_penalty", _one_of(0.0)),
    _Rule(_ITEMS, "logprobs", _one_of(None, 0)),
    _Rule(_ITEMS, "logit_bias", _one_of(None, {})),
    _Rule(_ITEMS, "allowed_token_ids structured_outputs", _one_of(None)),
)
# fmt: on


def _broken_rules(params: SamplingParams, requests: str) -> Iterator[tuple[str, str]]:
    """Yield the sampling parameters that a kind of request cannot have, and what to do."""
    for rule in _RULES:
        if requests == rule.requests:
            for name in rule.names.split():
                if not rule.allows(getattr(params, name)):
                    yield name, rule.advice


# -- beam requests ---------------------------------------------------------------------------------


def check_api_request(request: Any) -> None:
    """Refuse an OpenAI request with an option that vLLM would ignore, or with a streamed search.

    Raises:
        BeamRequestError: An option stands outside of ``vllm_xargs``, or a search asks for a stream.
    """
    is_beam = getattr(request, "use_beam_search", False) or "beam_width" in (
        getattr(request, "vllm_xargs", None) or ()
    )
    refuse_misplaced(getattr(request, "model_extra", None) or {}, is_beam)
    if is_beam and getattr(request, "stream", False):
        raise BeamRequestError(
            "stream=true is not supported with beam search: hypotheses are known only at the end; "
            "set stream to false"
        )


def prepare_request(vllm_config: VllmConfig, params: Any) -> Any:
    """Check any request's extra arguments; return what the engine gets, `params` for most.

    Raises:
        BeamRequestError: The engine cannot serve it.
    """
    with refusing_what_fails():
        processors = custom_processors(vllm_config)
        check_extra_args(vllm_config, params, processors)
        extra_args = extra_args_of(params)
        if "beam_width" in extra_args:
            return _prepare_search(vllm_config, params, processors)
        if "items" in extra_args:
            raise BeamRequestError(
                f"items={shown(extra_args['items'])} needs 'beam_width'; add beam_width=1 for the "
                "best item by greedy steps, or more for the best of as many hypotheses"
            )
        return params


def _prepare_search(
    vllm_config: VllmConfig, params: SamplingParams, processors: Sequence[str]
) -> SamplingParams:
    if reason := reason_off(vllm_config):
        raise BeamRequestError(
            f"beam_width was given, but native beam search is off: {reason}. vLLM's own runs with "
            "LLM.beam_search and use_beam_search"
        )
    prepared = prepare_params(params)
    _check_processors(prepared, processors)
    options = beam_spec(prepared).options
    check_slots(options.beam_width, beam_slots(vllm_config))
    if options.items is not None:
        _check_catalogue(vllm_config, options.items)
        _check_with_items(params)
        if options.items_end == "eos" and params.ignore_eos:
            raise BeamRequestError("ignore_eos=True is not supported with items; leave it out")
    if reason := unsupported_rule(vllm_config, params):
        raise BeamRequestError(f"beam search: {reason}; leave one of them out")
    return prepared


def prepare_params(params: SamplingParams) -> SamplingParams:
    """Check a beam request by itself and return a copy that the engine understands.

    A normalized description is under :data:`SPEC_KEY` of its ``extra_args``, where
    :func:`beam_spec` reads it back. It has the ``n`` of the request: vLLM makes ``n`` requests of
    one that asks for ``n`` outputs, and a search is one request.

    Raises:
        BeamRequestError: An option is wrong, or a sampling parameter does not go with beam search.
    """
    options, extra_args = _parsed(params)
    if params.n > options.beam_width:
        raise BeamRequestError(
            f"beam search: n must be at most beam_width={options.beam_width}, got n={params.n}; "
            "raise beam_width or lower n"
        )
    advice = dict(_broken_rules(params, _BEAMS))
    if params.stop and not options.detokenize:
        advice["stop"] = "stop strings need text; leave detokenize out"
    if options.do_sample and params.temperature < 1e-5:
        advice["temperature"] = "use a temperature above 0, or leave do_sample out"
    for name, what in advice.items():
        raise BeamRequestError(
            f"beam search: {name}={shown(getattr(params, name))} is not supported with beam_width"
            f"; {what}"
        )
    spec = {"n": params.n, "options": packed(options)}
    prepared = _with_extra_args(params, options, {**extra_args, SPEC_KEY: spec})
    prepared.n = 1
    prepared.watermarking = False
    return prepared


def _parsed(
    params: SamplingParams,
) -> tuple[BeamOptions, dict[str, Any]]:
    """Return the options of a request, and its other extra arguments, none of them misspelled."""
    extra_args = dict(extra_args_of(params))
    given = {name: extra_args.pop(name) for name in OPTION_NAMES & extra_args.keys()}
    refuse_misspelled(extra_args)
    try:
        return parse_options(given), extra_args
    except ValueError as error:
        raise BeamRequestError(str(error)) from None


def _with_extra_args(
    params: SamplingParams, options: BeamOptions, extra_args: dict[str, object]
) -> SamplingParams:
    prepared = params.clone()
    prepared.detokenize &= options.detokenize
    prepared.extra_args = extra_args
    return prepared


def _check_processors(params: SamplingParams, processors: Sequence[str]) -> None:
    """Refuse a prepared beam request with extra arguments for a custom logits processor.

    Rows rank candidates by log-probabilities that vLLM takes before such processors, and a fork
    would lack the state that a processor keeps of its parent.
    """
    others = sorted(extra_args_of(params).keys() - {SPEC_KEY, CACHE_SALT, *option_keys()})
    if others and processors:
        raise BeamRequestError(
            f"beam search: extra_args {shown(others)} may drive a custom logits processor "
            f"({', '.join(processors)}), and these do not act on beam search; leave them out"
        )


def check_processed(vllm_config: VllmConfig, request: EngineCoreRequest) -> None:
    """Refuse a processed beam request that the engine cannot hold.

    Raises:
        BeamRequestError: Why it cannot be served.
    """
    with refusing_what_fails():
        if SPEC_KEY in extra_args_of(request.sampling_params):
            _check_search(vllm_config, request)


def _check_search(vllm_config: VllmConfig, request: EngineCoreRequest) -> None:
    check_inputs(request)
    cache = vllm_config.cache_config
    params, prompt = request.sampling_params, request.prompt_token_ids
    assert params is not None
    assert prompt is not None
    options = beam_spec(params).options
    if options.items is not None:
        _check_length(vllm_config, params, options, len(prompt))
    if cache.num_gpu_blocks:  # known here
        # Data-parallel engines report the sum of their blocks.
        blocks = cache.num_gpu_blocks // vllm_config.parallel_config.data_parallel_size - 1
        room = vllm_config.model_config.max_model_len - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        check_blocks(len(prompt), options.beam_width, max_new, cache.block_size, blocks)


# -- requests inside a catalogue -------------------------------------------------------------------


def _check_catalogue(vllm_config: VllmConfig, name: str) -> None:
    names = catalogue_paths(vllm_config)
    if name not in names:
        served = ", ".join(map(repr, names)) or "none"
        raise BeamRequestError(
            f"items={shown(name)} is no catalogue of this engine, which has {served}; name one of "
            f"them, or start the engine with {spelled(ITEMS)}"
        )


def _check_with_items(params: SamplingParams) -> None:
    for name, advice in _broken_rules(params, _ITEMS):
        raise BeamRequestError(
            f"{name}={shown(getattr(params, name))} is not supported with items; {advice}"
        )


def _check_length(
    vllm_config: VllmConfig, params: SamplingParams, options: BeamOptions, num_prompt_tokens: int
) -> None:
    """Refuse a request whose hypotheses would end before the longest item is complete."""
    assert options.items is not None
    with_eos = options.items_end == "eos"
    if with_eos and params.eos_token_id is None:
        raise BeamRequestError(
            "beam search: items_end='eos' needs a model with an EOS token; use 'complete'"
        )
    path = catalogue_paths(vllm_config)[options.items]
    try:
        header = _read_header(path, file_stamp(path))
    except (ItemsError, OSError):
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


@functools.lru_cache(maxsize=64)
def _read_header(path: Path, stamp: tuple[int, ...]) -> ItemsHeader:
    return read_header(path)


def _check_ids(options: BeamOptions, header: ItemsHeader) -> None:
    kind = {"int": int, "str": str}[header.ids]
    for name in ("allow_items", "deny_items"):
        for item_id in (getattr(options, name) or ())[:1]:
            if not isinstance(item_id, kind):
                raise BeamRequestError(
                    f"{name} has {shown(item_id)}, the ids of {options.items!r} are of type "
                    f"{header.ids}; write them so"
                )
