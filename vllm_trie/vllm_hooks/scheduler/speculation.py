"""Tree speculation in vLLM's schedulers: cache salts to the worker, statistics from it.

vLLM keeps a request's ``cache_salt`` in the scheduler, where the prefix cache needs it. Drafters
that learn from finished requests must know whose text they may use, so the scheduler adds the salt
to the sampling parameters' ``extra_args``, which reach the worker.

A worker attaches its :class:`TreeStats` to ``ModelRunnerOutput``. The scheduler moves them into the
``SpecDecodingStats`` that vLLM sends to the front end, whose stat logger counts and logs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT
from vllm_trie.vllm_hooks.worker.stats import FILLERS_ATTRIBUTE, STATS_ATTRIBUTE, TreeStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


@dataclass
class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's speculation statistics of a step, and the plugin's."""

    tree: TreeStats = field(default_factory=TreeStats)


def wrap_stats_annotations(original: dict[str, Any]) -> dict[str, Any]:
    """Have the front end's decoder, which is built from them, decode the plugin's part."""
    return {**original, "spec_decoding_stats": TreeSpecDecodingStats | None}


def wrap_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send cache salts to the workers."""

    @functools.wraps(original)
    def add_request(self: Scheduler, request: Request) -> Any:
        if request.cache_salt and request.sampling_params is not None:
            extra = request.sampling_params.extra_args or {}
            request.sampling_params.extra_args = {**extra, CACHE_SALT: request.cache_salt}
        return original(self, request)

    return add_request


def wrap_update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the workers' statistics until the scheduler makes its own; count no fillers."""

    @functools.wraps(original)
    def update_from_output(self: Scheduler, scheduler_output: Any, model_runner_output: Any) -> Any:
        report = getattr(model_runner_output, STATS_ATTRIBUTE, None)
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

    return update_from_output


def wrap_make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add what was kept to the statistics of a step with drafts; vLLM divides by their number."""

    @functools.wraps(original)
    def make_stats(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        stats = original(self, *args, **kwargs)
        pending = getattr(self, STATS_ATTRIBUTE, None)
        if stats is not None and stats.spec_decoding_stats is not None and pending is not None:
            shared = stats.spec_decoding_stats
            values = {f.name: getattr(shared, f.name) for f in fields(SpecDecodingStats)}
            stats.spec_decoding_stats = TreeSpecDecodingStats(**values, tree=pending)
            setattr(self, STATS_ATTRIBUTE, None)
        return stats

    return make_stats
