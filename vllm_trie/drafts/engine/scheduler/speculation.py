"""Tree speculation in vLLM's schedulers: cache salts of requests, statistics from the worker.

A worker attaches its :class:`TreeStats` to ``ModelRunnerOutput``. The scheduler moves them into the
``SpecDecodingStats`` that vLLM sends to the front end, whose stat logger counts and logs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_trie.hooks.ledger.record import STATS, Result, Symbols
from vllm_trie.hooks.wire import (
    CACHE_SALT,
    FILLERS_ATTRIBUTE,
    STATS_ATTRIBUTE,
    TreeStats,
    extra_args_of,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, StreamingUpdate


@dataclass
class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's speculation statistics of a step, and the plugin's."""

    tree: TreeStats = field(default_factory=TreeStats)


_metrics = Symbols("v1.metrics.", STATS)
_scheduler = Symbols("v1.core.sched.scheduler:Scheduler.", STATS)


@_metrics.replaces(
    "stats:SchedulerStats.__annotations__",
    "lets the front end decode the plugin's part of spec_decoding_stats",
)
def stats_annotations(original: dict[str, object]) -> dict[str, Any]:
    """Have the front end's decoder, which is built from them, decode the plugin's part."""
    return {**original, "spec_decoding_stats": TreeSpecDecodingStats | None}


@Symbols("v1.request:Request.", "workers get cache salts").wraps(
    "from_engine_core_request", "sends cache salts to the worker, whatever the front end"
)
def from_engine_core_request(
    original: Callable[..., Request], request: EngineCoreRequest, block_hasher: object
) -> Request:
    """Add a request's cache salt to its options, in place of what the client wrote there.

    Drafters that learn from finished requests must know whose text they may use.
    """
    result = original(request, block_hasher)
    params = result.sampling_params
    if params is not None and (request.cache_salt or CACHE_SALT in extra_args_of(params)):
        result.sampling_params = salted = copy(params)  # it may be the client's
        salted.extra_args = {**extra_args_of(params), CACHE_SALT: request.cache_salt}
    return result


@_scheduler.wraps(
    "_update_request_as_session",
    "a streaming session goes on without the draft tokens that were accepted behind its stop, and "
    "without the draft that followed them",
    until="vLLM drops them",
)
def update_request_as_session(
    original: Callable[..., Result], self: Scheduler, session: Request, update: StreamingUpdate
) -> Result:
    # Plain decoding has not computed the last token of an answer, which vLLM drops.
    session.num_computed_tokens = min(session.num_computed_tokens, session.num_tokens - 1)
    session.spec_token_ids = []
    return original(self, session, update)


@_scheduler.wraps("make_spec_decoding_stats", "fillers count as no draft")
def make_spec_decoding_stats(
    original: Callable[..., SpecDecodingStats | None],
    self: Scheduler,
    spec_decoding_stats: SpecDecodingStats | None,
    *,
    num_draft_tokens: int,
    num_invalid_spec_tokens: dict[str, int] | None,
    request_id: str,
    **counts: int,
) -> SpecDecodingStats | None:
    pending: TreeStats | None = getattr(self, STATS_ATTRIBUTE, None)
    if num_draft_tokens == (num_invalid_spec_tokens or {}).get(request_id, 0) and (
        spec_decoding_stats is not None or pending is None or not pending.draft_failures
    ):
        return spec_decoding_stats
    return original(
        self,
        spec_decoding_stats,
        num_draft_tokens=num_draft_tokens,
        num_invalid_spec_tokens=num_invalid_spec_tokens,
        request_id=request_id,
        **counts,
    )


@_scheduler.wraps("update_from_output", "sends the worker's statistics to the front end")
def update_from_output(
    original: Callable[..., dict[int, EngineCoreOutputs]],
    self: Scheduler,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    """Keep the workers' statistics until a step with drafts, and add them to vLLM's, which divides
    by the number of such steps; count no fillers."""
    report: TreeStats | None = getattr(model_runner_output, STATS_ATTRIBUTE, None)
    pending: TreeStats | None = getattr(self, STATS_ATTRIBUTE, None)
    if pending is None:
        pending = report
    elif report is not None:
        pending.add(report)
    setattr(self, STATS_ATTRIBUTE, pending)
    fillers = getattr(model_runner_output, FILLERS_ATTRIBUTE, None)
    if fillers:
        # A draft that the grammar cut short may have ended before that.
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        scheduler_output.num_invalid_spec_tokens = {
            request_id: max(count, invalid.get(request_id, 0))
            for request_id, count in fillers.items()
        }
    outputs = original(self, scheduler_output, model_runner_output)
    if pending is not None and _add(outputs.values(), pending):
        setattr(self, STATS_ATTRIBUTE, None)
    return outputs


def _add(outputs: Iterable[EngineCoreOutputs], report: TreeStats) -> bool:
    """Add a report to the statistics of a step, and return whether it has some, with drafts."""
    for stats in (output.scheduler_stats for output in outputs):
        if stats is not None and (shared := stats.spec_decoding_stats) is not None:
            stats.spec_decoding_stats = TreeSpecDecodingStats(**vars(shared), tree=report)
            return True
    return False
