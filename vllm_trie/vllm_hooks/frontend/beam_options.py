"""From the user's ``SamplingParams`` to the search, and the marks that requests carry.

In the front end, :func:`prepare_params` checks a beam request and puts a normalized description
under :data:`SPEC_KEY` into its ``extra_args``; vLLM copies it to the ``n`` member requests that it
makes of the request. In the engine, :func:`beam_spec` reads it back.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_trie.beam import OPTION_NAMES, BeamOptions, SearchSettings, parse_options
from vllm_trie.vllm_hooks.frontend.request_options import SPECULATION

SPEC_KEY = "vllm_trie_beam"
"""Key in ``extra_args`` of a member request, and of the result in ``kv_transfer_params``."""

_SIMILAR = 0.82
"""Ratio of :class:`difflib.SequenceMatcher` from which a name is taken for a misspelled option."""


class BeamRequestError(VLLMValidationError, ValueError):
    """A beam request that cannot be served; the server answers 400 with its message."""


class BeamSpec(NamedTuple):
    """What the engine needs to know beside the member's own ``SamplingParams``.

    Attributes:
        n: Members of the request.
        options: Of the search.
        seed: Of the search. vLLM gives each member a seed of its own, or none; but a short search
            may be over before its last member arrives, whose search must find the same.
    """

    n: int
    options: BeamOptions
    seed: int


def asks_for_beam(params: Any) -> bool:
    """Whether a request of these parameters is a beam request of ours."""
    extra_args = getattr(params, "extra_args", None)
    return bool(extra_args) and "beam_width" in extra_args


def refuse_own_key(params: Any) -> None:
    """Refuse a request that brings the description which only the plugin may write.

    Raises:
        BeamRequestError: It does; the engine would take it for a checked one.
    """
    if SPEC_KEY in (getattr(params, "extra_args", None) or {}):
        raise BeamRequestError(
            f"extra_args[{SPEC_KEY!r}] is for vllm-trie's own use; leave it out, and ask for a "
            "beam search with 'beam_width'"
        )


def prepare_params(params: SamplingParams) -> SamplingParams:
    """Check a beam request and return a copy that the engine understands.

    Raises:
        BeamRequestError: An option is wrong, or a sampling parameter does not go with beam search.
    """
    assert params.extra_args is not None
    extra_args = dict(params.extra_args)
    given = {name: extra_args.pop(name) for name in OPTION_NAMES & extra_args.keys()}
    _refuse_misspelled(extra_args)
    try:
        options = parse_options(given)
    except ValueError as error:
        raise BeamRequestError(str(error)) from None
    if params.n > options.beam_width:
        raise BeamRequestError(
            f"beam search: n must be at most beam_width={options.beam_width}, got n={params.n}; "
            "raise beam_width or lower n"
        )
    _refuse_unsupported(params, options)
    # NumPy's generators take no negative seeds.
    seed = random.getrandbits(64) if params.seed is None else params.seed % 2**64
    extra_args[SPEC_KEY] = {"n": params.n, "options": options.model_dump(), "seed": seed}
    prepared = params.clone()
    prepared.extra_args = extra_args
    prepared.watermarking = False
    return prepared


def check_inputs(request: Any) -> None:
    """Refuse a beam request with inputs that the search cannot continue.

    Args:
        request: vLLM's ``EngineCoreRequest`` or ``Request``.

    Raises:
        BeamRequestError: It has embeddings, images or an open end.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise BeamRequestError("beam search: prompt embeddings are not supported; send token ids")
    if request.mm_features:
        raise BeamRequestError("beam search: multimodal prompts are not supported with beam_width")
    if request.resumable:
        raise BeamRequestError("beam search: streaming input is not supported with beam_width")


def beam_spec(params: SamplingParams | None) -> BeamSpec | None:
    """The beam description of a member request, None for an ordinary request."""
    if params is None or not params.extra_args:
        return None
    spec = params.extra_args.get(SPEC_KEY)
    if spec is None:
        return None
    return BeamSpec(spec["n"], BeamOptions.model_validate(spec["options"]), spec["seed"])


def search_settings(params: SamplingParams, spec: BeamSpec, max_new_tokens: int) -> SearchSettings:
    """The search that a member's parameters ask for."""
    options = spec.options
    stop_token_ids = [params.eos_token_id, *(params.stop_token_ids or ())]
    do_sample = options.do_sample
    return SearchSettings(
        beam_width=options.beam_width,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys(t for t in stop_token_ids if t is not None)),
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        num_beam_groups=options.num_beam_groups,
        diversity_penalty=options.diversity_penalty,
        do_sample=do_sample,
        temperature=params.temperature if do_sample else 1.0,
        top_k=max(params.top_k, 0) if do_sample else 0,
        top_p=params.top_p if do_sample else 1.0,
        seed=spec.seed if do_sample else None,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or ()),
        trace=options.beam_trace,
    )


def min_blocks(num_prompt_tokens: int, beam_width: int, max_new: int, block_size: int) -> int:
    """Fewest KV blocks with which a search can take its steps.

    After the first fork every row has a block of its own behind the prompt's full blocks.
    """
    full, tail = divmod(num_prompt_tokens, block_size)
    if max_new <= 1 or beam_width == 1:
        return full + bool(tail) + (max_new > 1 and not tail)
    return full + beam_width


def row_params(num_candidates: int, max_new_tokens: int) -> SamplingParams:
    """Sampling parameters of a row: greedy, with the log-probabilities of the best candidates."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        logprobs=num_candidates,
        ignore_eos=True,
        detokenize=False,
        watermarking=False,  # rows do not pass the front end, which would settle it
        extra_args={SPECULATION: False},
    )


def _refuse_misspelled(names: Iterable[str]) -> None:
    """Refuse keys that look like an option; others may be for somebody else."""
    for name in names:
        for meant in difflib.get_close_matches(name, OPTION_NAMES, n=1, cutoff=_SIMILAR):
            raise BeamRequestError(f"beam search: {name!r} is unknown; did you mean {meant!r}?")


def _refuse_unsupported(params: SamplingParams, options: BeamOptions) -> None:
    refused: Sequence[tuple[str, bool, Any, str]] = (
        (
            "repetition_penalty",
            params.repetition_penalty < 1.0,
            params.repetition_penalty,
            "use a value of at least 1",
        ),
        (
            "presence_penalty",
            params.presence_penalty < 0.0,
            params.presence_penalty,
            "use a value of at least 0",
        ),
        (
            "frequency_penalty",
            params.frequency_penalty < 0.0,
            params.frequency_penalty,
            "use a value of at least 0",
        ),
        ("min_p", params.min_p > 0.0, params.min_p, "leave it out"),
        ("logit_bias", bool(params.logit_bias), params.logit_bias, "leave it out"),
        (
            "allowed_token_ids",
            params.allowed_token_ids is not None,
            params.allowed_token_ids,
            "leave it out",
        ),
        (
            "structured_outputs",
            params.structured_outputs is not None,
            params.structured_outputs,
            "leave it out, or use LLM.beam_search, which hands such requests to vLLM's own search",
        ),
        (
            "prompt_logprobs",
            params.prompt_logprobs is not None,
            params.prompt_logprobs,
            "leave it out",
        ),
        (
            "logprob_token_ids",
            params.logprob_token_ids is not None,
            params.logprob_token_ids,
            "leave it out",
        ),
        (
            "logprobs",
            params.logprobs is not None and params.logprobs < 0,
            params.logprobs,
            "ask for a number of log-probabilities",
        ),
        (
            "repetition_detection",
            params.repetition_detection is not None,
            params.repetition_detection,
            "leave it out",
        ),
        (
            "thinking_token_budget",
            params.thinking_token_budget is not None,
            params.thinking_token_budget,
            "leave it out",
        ),
        (
            "temperature",
            options.do_sample and params.temperature < 1e-5,
            params.temperature,
            "use a temperature above 0, or leave do_sample out",
        ),
    )
    for name, wrong, value, advice in refused:
        if wrong:
            raise BeamRequestError(
                f"beam search: {name}={value!r} is not supported with beam_width; {advice}"
            )
