"""Tree speculation in vLLM's schedulers: cache salts to the worker, and statistics from it.

vLLM keeps a request's ``cache_salt`` in the scheduler, where the prefix cache needs it. Drafters
that learn from finished requests must know whose text they may use, so the scheduler adds the salt
to the sampling parameters' ``extra_args``, which reach the worker.

A worker attaches its :class:`TreeStats` to ``ModelRunnerOutput``. The scheduler moves them into the
``SpecDecodingStats`` that vLLM sends to the front end, whose stat logger counts and logs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_trie.hooks.ledger.record import STATS, Result, Symbols
from vllm_trie.hooks.wire import (
    CACHE_SALT,
    FILLERS_ATTRIBUTE,
    STATS_ATTRIBUTE,
    TreeStats,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats
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


@_scheduler.wraps(
    "add_request",
    "sends a request's cache salt to the worker",
    until="proposers get the requests' cache salts",
)
def add_request(original: Callable[..., Result], self: Scheduler, request: Request) -> Result:
    if request.cache_salt and request.sampling_params is not None:
        extra = request.sampling_params.extra_args or {}
        request.sampling_params.extra_args = {**extra, CACHE_SALT: request.cache_salt}
    return original(self, request)


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


@_scheduler.wraps("update_from_output", "takes the worker's statistics from its output")
def update_from_output(
    original: Callable[..., Result],
    self: Scheduler,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> Result:
    """Keep the workers' statistics until the scheduler makes its own; count no fillers."""
    report: TreeStats | None = getattr(model_runner_output, STATS_ATTRIBUTE, None)
    if report is not None:
        pending = getattr(self, STATS_ATTRIBUTE, None)
        if pending is None:
            setattr(self, STATS_ATTRIBUTE, report)
        else:
            pending.add(report)
    fillers = getattr(model_runner_output, FILLERS_ATTRIBUTE, None)
    if fillers:
        # A draft that the grammar cut short may have ended before that.
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        scheduler_output.num_invalid_spec_tokens = {
            request_id: max(count, invalid.get(request_id, 0))
            for request_id, count in fillers.items()
        }
    return original(self, scheduler_output, model_runner_output)


@_scheduler.wraps("make_stats", "adds them to the statistics that vLLM sends to the front end")
def make_stats(
    original: Callable[..., SchedulerStats | None],
    self: Scheduler,
    spec_decoding_stats: SpecDecodingStats | None = None,
    *args: object,
    **kwargs: object,
) -> SchedulerStats | None:
    """Add what was kept to the statistics of a step with drafts; vLLM divides by their number."""
    stats = original(self, spec_decoding_stats, *args, **kwargs)
    pending = getattr(self, STATS_ATTRIBUTE, None)
    if stats is not None and stats.spec_decoding_stats is not None and pending is not None:
        shared = stats.spec_decoding_stats
        values = {f.name: getattr(shared, f.name) for f in fields(SpecDecodingStats)}
        stats.spec_decoding_stats = TreeSpecDecodingStats(**values, tree=pending)
        setattr(self, STATS_ATTRIBUTE, None)
    return stats
