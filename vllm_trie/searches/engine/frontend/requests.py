"""Beam requests: every check of them.

:func:`prepare_request` checks what the user gave and returns what the engine gets,
:func:`check_processed` checks the processed request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel
from vllm.sampling_params import SamplingParams

from vllm_trie.hooks.frontend.request_options import chat_fields, option_keys, refusing_what_fails
from vllm_trie.hooks.start.limits import reason_off
from vllm_trie.hooks.wire import (
    CACHE_SALT,
    SEARCH_KEY,
    extra_args_of,
    is_search,
)
from vllm_trie.refusal import shown
from vllm_trie.searches import BeamOptions, parse_options
from vllm_trie.searches.engine.beam_support import (
    BeamRequestError,
    beam_slots,
    check_blocks,
    min_blocks,
    unsupported_rule,
)
from vllm_trie.searches.engine.constraint import constraints, option_names
from vllm_trie.searches.engine.frontend.extra_args import (
    check_extra_args,
    custom_processors,
    refuse_misplaced,
    refuse_misspelled,
)
from vllm_trie.searches.engine.frontend.hypotheses import served
from vllm_trie.searches.engine.search_wire import BeamSpec, beam_spec
from vllm_trie.searches.settings import MAX_CANDIDATES, MAX_RULES, MAX_STOP_LENGTH

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.engine import EngineCoreRequest

# -- sampling parameters ---------------------------------------------------------------------------

_Allows = Callable[[Any], bool]


class _Rule(NamedTuple):
    """The allowed values of some sampling parameters of a beam request."""

    names: str
    allows: _Allows
    advice: str = "leave it out"


def _at_least(least: float) -> _Allows:
    return lambda value: value is None or value >= least


def _is_short(value: Any) -> bool:
    return len(value or ()) <= MAX_RULES


def _is_finite(value: Mapping[int, float] | None) -> bool:
    return all(math.isfinite(bias) for bias in (value or {}).values())


# fmt: off
_RULES = (
    _Rule("repetition_penalty", _at_least(1.0), "use a value of at least 1"),
    _Rule("presence_penalty frequency_penalty logprobs", _at_least(0.0),
        "use a value of at least 0"),
    _Rule("min_p", lambda value: not value),
    _Rule("prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids "
        "repetition_detection thinking_token_budget trace_decode_token_ids",
        lambda value: value is None),
    _Rule("bad_words stop stop_token_ids logit_bias", _is_short,
        f"use at most {MAX_RULES} entries"),
    _Rule("stop", lambda stops: all(len(stop) <= MAX_STOP_LENGTH for stop in stops or ()),
        f"use at most {MAX_STOP_LENGTH} characters in each"),
    _Rule("logit_bias", _is_finite,
        "use finite numbers; allowed_token_ids forbids tokens"),
)
# fmt: on


def _broken_rules(params: SamplingParams) -> Iterator[tuple[str, str]]:
    """Yield the sampling parameters that a beam request cannot have, and what to do."""
    for rule in _RULES:
        for name in rule.names.split():
            if not rule.allows(getattr(params, name)):
                yield name, rule.advice


_NEUTRAL = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0,
}  # fmt: skip
"""Parameters that a model's ``generation_config.json`` gives to requests over HTTP."""


def _without_defaults(params: SamplingParams, spec: BeamSpec) -> SamplingParams:
    """Return parameters without those that a search cannot have and that the server has added.

    As in ``generate`` of Hugging Face, defaults that a search can have act on it. Constraints take
    none of them.
    """
    if (call := served.get()) is None:
        return params
    names = dict(_broken_rules(params)) if spec.constraint is None else _NEUTRAL
    params = params.clone()
    for name in _NEUTRAL.keys() & names:
        if getattr(call.request, name, None) is None:
            setattr(params, name, _NEUTRAL[name])
    return params


# -- beam requests ---------------------------------------------------------------------------------


def check_api_request(request: Any) -> None:
    """Refuse an OpenAI request with an option that vLLM would ignore, or with a streamed search.

    Raises:
        BeamRequestError: An option stands outside of ``vllm_xargs``, or a search asks for a stream.
    """
    is_beam = getattr(request, "use_beam_search", False) or "beam_width" in (
        getattr(request, "vllm_xargs", None) or ()
    )
    fields = getattr(request, "model_extra", None) or {}
    in_chats = chat_fields() if hasattr(request, "messages") else ()
    refuse_misplaced({n: value for n, value in fields.items() if n not in in_chats}, is_beam)
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
        if name := next(iter(constraints().keys() & extra_args.keys()), None):
            raise BeamRequestError(
                f"{name}={shown(extra_args[name])} needs 'beam_width'; add beam_width=1 for the "
                "best answer by greedy steps, or more for the best of as many hypotheses"
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
    spec, others = _parsed(params)
    params = _without_defaults(params, spec)
    if spec.constraint is not None:
        spec.constraint.check(vllm_config, params, spec.options)
    prepared = _prepared(params, spec, others)
    _check_processors(prepared, processors)
    width, slots = spec.options.beam_width, beam_slots(vllm_config)
    if width > slots:
        raise BeamRequestError(
            f"beam_width must be at most max_num_seqs={slots}, got {width}; lower beam_width or "
            "start the engine with a larger max_num_seqs"
        )
    if reason := unsupported_rule(vllm_config, params):
        raise BeamRequestError(f"beam search: {reason}; leave one of them out")
    return prepared


def _prepared(params: SamplingParams, spec: BeamSpec, extra_args: dict[str, Any]) -> SamplingParams:
    """Return a copy of a search's parameters that the engine understands.

    Its ``extra_args`` have the description, with the ``n`` of the request: vLLM makes ``n``
    requests of one that asks for ``n`` outputs, and a search is one request.
    """
    options = spec.options
    if params.n > options.beam_width:
        raise BeamRequestError(
            f"beam search: n must be at most beam_width={options.beam_width}, got n={params.n}; "
            "raise beam_width or lower n"
        )
    advice = dict(_broken_rules(params))
    if params.stop and not options.detokenize:
        advice["stop"] = "stop strings need text; leave detokenize out"
    most = MAX_CANDIDATES // options.beam_width - 1
    if params.stop_token_ids and len(params.stop_token_ids) > most:
        advice["stop_token_ids"] = f"use at most {most}, or a smaller beam_width"
    if options.do_sample and params.temperature < 1e-5:
        advice["temperature"] = "use a temperature above 0, or leave do_sample out"
    if advice:
        name, what = next(iter(advice.items()))
        raise BeamRequestError(
            f"beam search: {name}={shown(getattr(params, name))} is not supported with beam_width"
            f"; {what}"
        )
    prepared = params.clone()
    prepared.detokenize &= options.detokenize
    prepared.extra_args = {**extra_args, SEARCH_KEY: spec.packed()}
    prepared.n = 1
    prepared.watermarking = False
    return prepared


def _parsed(params: SamplingParams) -> tuple[BeamSpec, dict[str, Any]]:
    """Return the search of a request, and its other extra arguments, none of them misspelled."""
    extra_args = dict(extra_args_of(params))
    given = {name: extra_args.pop(name) for name in option_names().keys() & extra_args.keys()}
    refuse_misspelled(extra_args)
    try:
        spec = BeamSpec(params.n, parse_options(BeamOptions, _part_of(given, BeamOptions)))
        for leader, kind in constraints().items():
            constraint = parse_options(kind, _part_of(given, kind))
            if getattr(constraint, leader) is not None:
                spec = spec._replace(constraint=constraint)
    except ValueError as error:
        raise BeamRequestError(str(error)) from None
    return spec, extra_args


def _part_of(given: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {name: given[name] for name in given.keys() & model.model_fields.keys()}


def _check_processors(params: SamplingParams, processors: Sequence[str]) -> None:
    """Refuse a prepared beam request with extra arguments for a custom logits processor.

    Rows rank candidates by log-probabilities that vLLM takes before such processors, and a fork
    would lack the state that a processor keeps of its parent.
    """
    others = sorted(extra_args_of(params).keys() - {SEARCH_KEY, CACHE_SALT, *option_keys()})
    if others and processors:
        raise BeamRequestError(
            f"beam search: extra_args {shown(others)} may drive a custom logits processor "
            f"({', '.join(processors)}), and these do not act on beam search; leave them out"
        )


@refusing_what_fails()
def check_processed(vllm_config: VllmConfig, request: EngineCoreRequest) -> None:
    """Refuse a processed beam request that the engine cannot hold.

    Raises:
        BeamRequestError: Why it cannot be served.
    """
    if not is_search(request.sampling_params):
        return
    cache = vllm_config.cache_config
    params, prompt = request.sampling_params, request.prompt_token_ids
    assert params is not None
    if prompt is None or request.prompt_embeds is not None:
        raise BeamRequestError("beam search: prompt embeddings are not supported; send token ids")
    if request.resumable:
        raise BeamRequestError("beam search: streaming input is not supported with beam_width")
    spec = beam_spec(params)
    if spec.constraint is not None:
        spec.constraint.check_processed(vllm_config, params, len(prompt))
    # Known here; before a window the engine needs no blocks, and checks that itself.
    if cache.num_gpu_blocks and vllm_config.model_config.get_sliding_window() is None:
        blocks = cache.num_gpu_blocks // _num_engines(vllm_config.parallel_config) - 1
        room = vllm_config.model_config.max_model_len - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        width, block_size = spec.options.beam_width, cache.block_size
        needed = min_blocks(len(prompt), width, max_new, block_size)
        check_blocks(needed, len(prompt), width, block_size, blocks)


def _num_engines(parallel: ParallelConfig) -> int:
    """Return the engines that this client manages, of whose blocks vLLM keeps the sum."""
    if parallel.data_parallel_rank_local is not None:  # offline, a client for each
        return 1
    if parallel.local_engines_only:
        return int(parallel.data_parallel_size_local)
    return int(parallel.data_parallel_size)
