"""Beam requests: from the user's ``SamplingParams`` to the settings of a search.

In the front end, :func:`prepare_params` checks a beam request and puts a normalized description
under :data:`SPEC_KEY` into its ``extra_args``. vLLM copies it to the ``n`` member requests that it
makes of the request. In the engine, :func:`beam_spec` reads it back.
"""

from __future__ import annotations

import difflib
import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from vllm_trie.beam import ITEM_OPTIONS, OPTION_NAMES, BeamOptions, SearchSettings, parse_options
from vllm_trie.beam.settings import MAX_RULES
from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT, SPECULATION, TRACE

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

SPEC_KEY = "vllm_trie_beam"
"""Key in ``extra_args`` of a member request, and of the result in ``kv_transfer_params``."""

DECODING_KEY = "vllm_trie_item"
"""Key in ``extra_args`` of an ordinary request that decodes an item."""

SIMILAR = 0.82
"""Ratio of :class:`difflib.SequenceMatcher` from which a name is taken for a misspelled option."""

OTHER_NAMES = {
    "num_beams": "'beam_width'",
    "beam_size": "'beam_width'",
    "diversity_rate": "'num_beam_groups' and 'diversity_penalty'",
    "num_return_sequences": "SamplingParams.n",
    "max_new_tokens": "SamplingParams.max_tokens",
    "min_new_tokens": "SamplingParams.min_tokens",
    "bad_words_ids": "SamplingParams.bad_words",
}
"""Names of options elsewhere, and what they are here."""

NOT_SERVED = frozenset({
    "begin_suppress_tokens", "constraints", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "guidance_scale", "prefix_allowed_tokens_fn", "renormalize_logits",
    "sequence_bias", "suppress_tokens", "top_h", "typical_p",
})  # fmt: skip
"""Options of Hugging Face's ``generate`` that change a search and have no counterpart here."""

_LEAST = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logprobs": 0,
}
"""Sampling parameters with a least value; None is allowed, too."""

_LEAVE_OUT: dict[str, Any] = {
    "min_p": 0.0,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "repetition_detection": None,
    "thinking_token_budget": None,
}
"""Sampling parameters without support, and the value that means unset, in addition to None."""


class BeamRequestError(VLLMValidationError, ValueError):
    """A beam request that cannot be served; the server answers 400 with its message."""


class BeamSpec(NamedTuple):
    """Description of a search that the engine needs in addition to ``SamplingParams``.

    Attributes:
        n: Members of the request.
        options: Options of the search.
        seed: Seed of the search. vLLM gives each member its own seed, or none; but a short search
            may end before its last member arrives, whose search must find the same.
    """

    n: int
    options: BeamOptions
    seed: int


def asks_for_beam(params: Any) -> bool:
    """Return whether a request with these parameters asks for native beam search."""
    return "beam_width" in (getattr(params, "extra_args", None) or {})


def refuse_own_key(params: Any) -> None:
    """Refuse a request with the description that only the plugin may write.

    Raises:
        BeamRequestError: It has one; the engine would trust it.
    """
    for key, option in ((SPEC_KEY, "beam_width"), (DECODING_KEY, "items")):
        if key in (getattr(params, "extra_args", None) or {}):
            raise BeamRequestError(
                f"extra_args[{key!r}] is for vllm-trie's own use; leave it out, and ask with "
                f"{option!r}"
            )


def prepare_params(params: SamplingParams) -> SamplingParams:
    """Check a beam request and return a copy that the engine understands.

    Raises:
        BeamRequestError: An option is wrong, or a sampling parameter does not go with beam search.
    """
    assert params.extra_args is not None
    extra_args = dict(params.extra_args)
    given = {name: extra_args.pop(name) for name in OPTION_NAMES & extra_args.keys()}
    refuse_misspelled(extra_args)
    if extra_args.pop(TRACE, False):
        raise BeamRequestError(
            f"beam search: {TRACE} is for requests with drafts, and a search has none; leave it out"
        )
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
    extra_args[SPEC_KEY] = {"n": params.n, "options": packed(options), "seed": seed}
    prepared = params.clone()
    prepared.extra_args = extra_args
    prepared.detokenize &= options.detokenize
    prepared.watermarking = False
    return prepared


def num_members(params: SamplingParams | None) -> int | None:
    """Return the number of members of a member's request, None for an ordinary request.

    It does not parse the options, which a wide search has once for each of its members.
    """
    spec = (params.extra_args or {}).get(SPEC_KEY) if params is not None else None
    return None if spec is None else int(spec["n"])


def wrap_from_engine_core_request(original: Callable[..., Request]) -> Callable[..., Request]:
    """Do not hash the prompt of a member: its group hashes it once, for the row of the prompt."""

    @functools.wraps(original)
    def from_engine_core_request(request: EngineCoreRequest, block_hasher: Any) -> Request:
        if num_members(request.sampling_params) is None:
            return original(request, block_hasher)
        member = original(request, None)
        member._block_hasher = block_hasher
        return member

    return from_engine_core_request


def beam_spec(params: SamplingParams) -> BeamSpec:
    """Return the description of a member request."""
    assert params.extra_args is not None
    spec = params.extra_args[SPEC_KEY]
    return BeamSpec(spec["n"], unpacked(spec["options"]), spec["seed"])


def packed(options: BeamOptions) -> str:
    """Return options as they travel with each member: a text is copied and read at no cost."""
    return options.model_dump_json(exclude_defaults=True)


def packed_options(params: SamplingParams) -> str:
    """Return the packed options of a member request."""
    assert params.extra_args is not None
    return str(params.extra_args[SPEC_KEY]["options"])


@functools.lru_cache(maxsize=64)
def unpacked(options: str) -> BeamOptions:
    """Return packed options; members of one request share them."""
    return BeamOptions.model_validate_json(options)


def search_settings(params: SamplingParams, spec: BeamSpec, max_new_tokens: int) -> SearchSettings:
    """Return the settings of the search that a member's parameters ask for."""
    stop_token_ids = [params.eos_token_id, *(params.stop_token_ids or ())]
    do_sample = spec.options.do_sample
    if spec.options.items is not None:  # only EOS, and only where it must follow an item
        stop_token_ids = [params.eos_token_id] if spec.options.items_end == "eos" else []
    return SearchSettings(
        **spec.options.model_dump(exclude={"beam_trace", "detokenize", *ITEM_OPTIONS}),
        trace=spec.options.beam_trace,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys(t for t in stop_token_ids if t is not None)),
        temperature=params.temperature if do_sample else 1.0,
        top_k=max(params.top_k, 0) if do_sample else 0,
        top_p=params.top_p if do_sample else 1.0,
        seed=spec.seed if do_sample else None,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or ()),
        logit_bias=tuple((params.logit_bias or {}).items()),
    )


def row_params(num_candidates: int | None, max_new_tokens: int) -> SamplingParams:
    """Return the parameters of a row: greedy, with the log-probabilities of its candidates.

    None for the candidates of a constrained row, which are not those of vLLM's sampler.
    """
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        logprobs=num_candidates,
        ignore_eos=True,
        detokenize=False,
        watermarking=False,  # rows do not pass the front end, which would settle it
        extra_args={SPECULATION: False},
    )


def check_inputs(request: EngineCoreRequest | Request) -> None:
    """Refuse a beam request with inputs that the search cannot continue.

    Raises:
        BeamRequestError: It has embeddings, images or streaming input.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise BeamRequestError("beam search: prompt embeddings are not supported; send token ids")
    if request.mm_features:
        raise BeamRequestError("beam search: multimodal prompts are not supported with beam_width")
    if request.resumable:
        raise BeamRequestError("beam search: streaming input is not supported with beam_width")


def check_processors(params: SamplingParams, processors: Sequence[str]) -> None:
    """Refuse a prepared beam request with extra arguments for a custom logits processor.

    Rows rank candidates by log-probabilities that vLLM takes before such processors, and a fork
    would lack the state that a processor keeps of its parent.

    Args:
        params: Parameters of the request, as :func:`prepare_params` returns them.
        processors: Names of the engine's custom logits processors.

    Raises:
        BeamRequestError: It has arguments that one of them may read.
    """
    assert params.extra_args is not None
    others = sorted(params.extra_args.keys() - {SPEC_KEY, SPECULATION, CACHE_SALT})
    if others and processors:
        raise BeamRequestError(
            f"beam search: extra_args {others} may drive a custom logits processor "
            f"({', '.join(processors)}), and these do not act on beam search; leave them out"
        )


def check_slots(beam_width: int, slots: int) -> None:
    """Refuse a search with more rows than an engine runs requests.

    Raises:
        BeamRequestError: `beam_width` is above `slots`.
    """
    if beam_width > slots:
        raise BeamRequestError(
            f"beam_width must be at most max_num_seqs={slots}, got {beam_width}; lower beam_width "
            "or start the engine with a larger max_num_seqs"
        )


def check_blocks(
    num_prompt_tokens: int, beam_width: int, max_new_tokens: int, block_size: int, blocks: int
) -> None:
    """Refuse a search that needs more KV blocks, of `block_size` tokens, than an engine has.

    Raises:
        BeamRequestError: It needs more than `blocks`.
    """
    needed = min_blocks(num_prompt_tokens, beam_width, max_new_tokens, block_size)
    if needed > blocks:
        raise BeamRequestError(
            f"beam_width={beam_width} with a prompt of {num_prompt_tokens} tokens needs at "
            f"least {needed} KV blocks of {block_size} tokens, the engine has {blocks}; "
            "lower beam_width, shorten the prompt or give the engine more KV cache memory"
        )


def min_blocks(
    num_prompt_tokens: int, beam_width: int, max_new_tokens: int, block_size: int
) -> int:
    """Return the fewest KV blocks with which a search can take its steps.

    After the first fork every row has a block of its own behind the prompt's full blocks.
    """
    full, tail = divmod(num_prompt_tokens, block_size)
    if max_new_tokens <= 1 or beam_width == 1:
        return full + bool(tail) + (max_new_tokens > 1 and not tail)
    return full + beam_width


def refuse_misspelled(names: Iterable[str]) -> None:
    """Refuse keys that look like an option; others may belong to other plugins.

    Raises:
        BeamRequestError: One of them does.
    """
    for name in names:
        if name in OTHER_NAMES:
            raise BeamRequestError(
                f"beam search: {name!r} is unknown with 'beam_width'; use {OTHER_NAMES[name]}"
            )
        if name in NOT_SERVED:
            raise BeamRequestError(
                f"beam search: {name!r} of Hugging Face's generate is not supported with "
                "'beam_width'; leave it out"
            )
        for meant in difflib.get_close_matches(name, OPTION_NAMES, n=1, cutoff=SIMILAR):
            raise BeamRequestError(f"beam search: {name!r} is unknown; did you mean {meant!r}?")


def _refuse_unsupported(params: SamplingParams, options: BeamOptions) -> None:
    advice: dict[str, str] = {}
    for name, least in _LEAST.items():
        value = getattr(params, name)
        if value is not None and value < least:
            advice[name] = f"use a value of at least {least:.0f}"
    for name, unset in _LEAVE_OUT.items():
        if getattr(params, name) not in (None, unset):
            advice[name] = "leave it out"
    for name in ("bad_words", "stop", "stop_token_ids", "logit_bias"):
        if len(getattr(params, name) or ()) > MAX_RULES:
            advice[name] = f"use at most {MAX_RULES} entries"
    if not all(math.isfinite(bias) for bias in (params.logit_bias or {}).values()):
        advice["logit_bias"] = "use finite numbers; allowed_token_ids forbids tokens"
    if params.stop and not options.detokenize:
        advice["stop"] = "stop strings need text; leave detokenize out"
    if options.do_sample and params.temperature < 1e-5:
        advice["temperature"] = "use a temperature above 0, or leave do_sample out"
    for name, what in advice.items():
        raise BeamRequestError(
            f"beam search: {name}={getattr(params, name)!r:.200} is not supported with beam_width"
            f"; {what}"
        )
