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
from typing import Any, Literal, Protocol, get_args

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.request import Request

# -- requests: keys of ``SamplingParams.extra_args`` -----------------------------------------------

SPECULATION = "speculation"
"""Switches a request's drafts off."""
CACHE_SALT = "vllm_trie_cache_salt"
"""Carries a request's cache salt to the worker."""
SEARCH_KEY = "vllm_trie_beam"
"""Description of a search in its request, and its result in the request's output."""


def extra_args_of(params: object) -> Mapping[str, Any]:
    """Return the extra arguments of a request's parameters, of any kind."""
    return getattr(params, "extra_args", None) or {}


class RequestData(Protocol):
    """The fields of a scheduled request that both model runners keep."""

    sampling_params: SamplingParams | None
    prompt_token_ids: list[int] | None
    lora_request: LoRARequest | None


def may_draft(request: RequestData) -> bool:
    """Return whether a request may have a draft at some time."""
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None:  # a prompt of embeddings
        return False
    if not extra_args_of(params).get(SPECULATION, True):
        return False
    return params.max_tokens != 1


def may_draft_on_v1(request: RequestData) -> bool:
    """Return the same on Model Runner V1, where a thinking budget counts a token for each step."""
    params = request.sampling_params
    return may_draft(request) and params is not None and params.thinking_token_budget is None


def is_search(params: SamplingParams | None) -> bool:
    """Return whether a request is a search."""
    return SEARCH_KEY in extra_args_of(params)


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


# -- the end of a start ---------------------------------------------------------------------------


@dataclass
class ReadyResponse(EngineCoreReadyResponse):
    """The report of an engine that has started, for the front end.

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
FAILURE_REASONS: tuple[FailureReason, ...] = get_args(FailureReason)

WaitCause = Literal["drafting", "pause_end"]
WAIT_CAUSES: tuple[WaitCause, ...] = get_args(WaitCause)


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
            cause: to draft, or to draft again after a pause.
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
