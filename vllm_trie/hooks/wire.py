"""What passes between the front end, the scheduler and the workers: keys, messages, their readers.

::

    front end  -- extra_args of a request -->  scheduler, workers
    scheduler  -- attributes of SchedulerOutput -->  workers
    workers    -- attributes of ModelRunnerOutput -->  scheduler  -- SchedulerStats -->  front end
    scheduler  -- result of a search, with its report -->  front end
    engine's process  -- ReadyResponse -->  front end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.request import Request

from vllm_trie.searches import ITEM_OPTIONS, BeamOptions, SearchSettings

# -- requests: keys of ``SamplingParams.extra_args`` -----------------------------------------------

SPECULATION = "speculation"
"""Switches a request's drafts off."""
CACHE_SALT = "vllm_trie_cache_salt"
"""Carries a request's cache salt to the worker."""
SPEC_KEY = "vllm_trie_beam"
"""Description of a search in its request, and its result in the request's output."""


def extra_args_of(params: object) -> Mapping[str, Any]:
    """Return the extra arguments of a request's parameters, of any kind."""
    return getattr(params, "extra_args", None) or {}


class _RequestData(Protocol):
    @property
    def sampling_params(self) -> SamplingParams | None: ...
    @property
    def prompt_token_ids(self) -> list[int] | None: ...


def may_draft(request: _RequestData) -> bool:
    """Return whether a request may have a draft at some time."""
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None:  # a prompt of embeddings
        return False
    if not extra_args_of(params).get(SPECULATION, True):
        return False
    if params.thinking_token_budget is not None:
        return False  # vLLM counts thinking tokens along a chain
    return params.max_tokens != 1


class BeamSpec(NamedTuple):
    """Description of a search that the engine needs in addition to ``SamplingParams``.

    Attributes:
        n: Hypotheses to return. vLLM sees a request with one output.
        options: Options of the search.
    """

    n: int
    options: BeamOptions


def is_search(params: SamplingParams | None) -> bool:
    """Return whether a request is a search."""
    return SPEC_KEY in extra_args_of(params)


def beam_spec(params: SamplingParams) -> BeamSpec:
    """Return the description of a search."""
    spec = extra_args_of(params)[SPEC_KEY]
    return BeamSpec(spec["n"], unpacked(spec["options"]))


def packed(options: BeamOptions) -> str:
    """Return options as they travel: a text is copied and read at no cost."""
    return options.model_dump_json(exclude_defaults=True)


def unpacked(options: str) -> BeamOptions:
    """Return packed options."""
    return BeamOptions.model_validate_json(options)


def search_settings(params: SamplingParams, spec: BeamSpec, max_new_tokens: int) -> SearchSettings:
    """Return the settings of the search that a request's parameters ask for."""
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
        # NumPy's generators take no negative seeds.
        seed=None if params.seed is None or not do_sample else params.seed % 2**64,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or ()),
        logit_bias=tuple((params.logit_bias or {}).items()),
    )


class InternalRequest(Request):
    """A request that the engine makes itself: nobody gets its tokens."""


def internal_params(max_tokens: int, **options: Any) -> SamplingParams:
    """Return the parameters of a request that the engine makes itself: greedy, without drafts."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        watermarking=False,  # it does not pass the front end, which would settle it
        extra_args={SPECULATION: False},
        **options,
    )


class SearchAnswer(NamedTuple):
    """Result of a search; the tokens of its hypotheses are one behind another in its output.

    Attributes:
        hypotheses: Best first.
        logprobs: Bytes of int32 [tokens, 1 + k] token ids, float32 [tokens, 1 + k] and int64
            [tokens] ranks of all hypotheses, None if the request has no ``logprobs``.
        shared: What all of them have in ``CompletionOutput.beam``.
        report: Labels and amounts of the plugin's counters, None without statistics.
    """

    hypotheses: list[HypothesisAnswer]
    logprobs: tuple[bytes, bytes, bytes] | None
    shared: dict[str, Any]
    report: dict[str, Any] | None


class HypothesisAnswer(NamedTuple):
    """One hypothesis of a :class:`SearchAnswer`.

    Attributes:
        num_tokens: Its length.
        finish_reason: vLLM's ``FinishReason``.
        stop_reason: As in ``CompletionOutput``.
        beam: Its own part of ``CompletionOutput.beam``.
    """

    num_tokens: int
    finish_reason: int
    stop_reason: int | str | None
    beam: dict[str, Any]


# -- the end of a start ---------------------------------------------------------------------------


@dataclass
class ReadyResponse(EngineCoreReadyResponse):
    """What the front end hears of an engine that has started.

    Attributes:
        beams_off: Why the engine has no native beam search, None if it has.
    """

    beams_off: str | None = None


# -- statistics: of the workers, on their way to the front end -------------------------------------

STATS_ATTRIBUTE = "vllm_trie_stats"
"""Attribute of ``ModelRunnerOutput`` that carries a :class:`TreeStats` to the scheduler."""
FILLERS_ATTRIBUTE = "vllm_trie_fillers"
"""Attribute of it with the number of a step's fillers by request id, on Model Runner V2."""

FailureReason = Literal["error", "malformed", "timeout", "start_check"]
FAILURE_REASONS: tuple[FailureReason, ...] = ("error", "malformed", "timeout", "start_check")

WaitCause = Literal["drafting", "pause_end", "verification"]
WAIT_CAUSES: tuple[WaitCause, ...] = ("drafting", "pause_end", "verification")


@dataclass(slots=True)
class TreeStats:
    """A worker's statistics of tree speculation: sums since the last report.

    Attributes:
        steps: Times that a request got new tokens, steps without a draft included.
        tokens: Output tokens, accepted and bonus ones.
        drafting_seconds: Time in the drafter.
        verification_seconds: Time in the tree walk and the KV moves, without the forward pass.
        preparation_seconds: Time to place the trees into the batch (positions, masks).
        bookkeeping_seconds: Time around the drafter: requests built, trees checked and kept.
        draft_failures: Failed drafts, by reasons that had any.
        waits: Steps for whose tokens the host waited before the next launch on Model Runner V2, by
            cause: to draft, to draft again after a pause, to take in the outcome of drafts in one.
        counts: What extras count, by name.
        of_requests: The same of each request; an extra that counts them takes them out in the
            scheduler.
    """

    steps: int = 0
    tokens: int = 0
    drafting_seconds: float = 0.0
    verification_seconds: float = 0.0
    preparation_seconds: float = 0.0
    bookkeeping_seconds: float = 0.0
    draft_failures: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    of_requests: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, other: TreeStats) -> None:
        """Add another report to this one."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTS:
            add_counts(getattr(self, name), getattr(other, name))
        for request_id, counts in other.of_requests.items():
            add_counts(self.of_requests.setdefault(request_id, {}), counts)

    def count(self, request_id: str, counts: Mapping[str, int]) -> None:
        """Add counts of a request, by name, to its and to the engine's."""
        add_counts(self.counts, counts)
        add_counts(self.of_requests.setdefault(request_id, {}), counts)


def add_counts(sums: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add counts to sums, by name."""
    for name, count in counts.items():
        sums[name] = sums.get(name, 0) + count


_COUNTS = ("draft_failures", "waits", "counts")
_SUMS = [f.name for f in fields(TreeStats) if f.name not in (*_COUNTS, "of_requests")]
