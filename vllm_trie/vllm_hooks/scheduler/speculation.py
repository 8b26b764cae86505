"""Tree speculation in vLLM's schedulers: cache salts to the worker, statistics from it, drafts
that give way to prompts.

vLLM keeps a request's ``cache_salt`` in the scheduler, where the prefix cache needs it. Drafters
that learn from finished requests must know whose text they may use, so the scheduler adds the salt
to the sampling parameters' ``extra_args``, which reach the worker.

A worker attaches its :class:`TreeStats` to ``ModelRunnerOutput``. The scheduler moves them into the
``SpecDecodingStats`` that vLLM sends to the front end, whose stat logger counts and logs them.

A step verifies the running requests' drafts and computes the prompts of new requests in one forward
pass. Each draft token makes that pass longer, and everybody whose prompt is in it waits for its
first token. Where one request waits for every few that decode, drafts therefore take a small share
of the prompts' tokens at most. In a large batch with a single prompt they stay: there they end more
requests, and so free more places, than their time costs: :class:`FirstTokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_trie.vllm_hooks.frontend.request_options import CACHE_SALT
from vllm_trie.vllm_hooks.worker.stats import FILLERS_ATTRIBUTE, STATS_ATTRIBUTE, TreeStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


WEIGHT = 8
"""Requests with a draft that count as much as one that waits for its first token."""
SHARE = 0.02
"""Draft tokens of a step for each token of the prompts that it computes."""


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


class FirstTokens:
    """Cuts the drafts of a step in which a request waits for its first token.

    A draft that is cut loses its last nodes. Nodes are in the order of their trees, the likeliest
    path first, so what remains is the beginning of the likeliest chain.

    Args:
        scheduler: vLLM's, without asynchronous scheduling: drafts that are in flight are not known
            here.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # Running requests that there will be if giving way helps somebody; 0 if nobody waits.
        self._hoped_for = 0
        # Those there were when it helped nobody: the KV cache had no room for more.
        self._in_vain: int | None = None

    def before_schedule(self) -> None:
        """Cut the drafts of the running requests, if the next step can compute a prompt."""
        scheduler, running = self._scheduler, self._scheduler.running
        self._hoped_for = 0
        if self._in_vain is not None and len(running) >= self._in_vain:
            return
        self._in_vain = None
        drafted = [request for request in running if request.spec_token_ids]
        if not drafted:
            return
        started = [each for each in running if each.num_computed_tokens < each.num_prompt_tokens]
        places = max(scheduler.max_num_running_reqs - len(running), 0)
        prompts = [*started, *islice(scheduler.waiting, places)]
        if not prompts or WEIGHT * len(prompts) < len(drafted):
            return
        if not started:
            self._hoped_for = len(running) + 1
        num_tokens = sum(each.num_prompt_tokens - each.num_computed_tokens for each in prompts)
        share = SHARE * min(num_tokens, scheduler.max_num_scheduled_tokens)
        for request in drafted:
            request.spec_token_ids = request.spec_token_ids[: int(share) // len(drafted)]

    def after_schedule(self) -> None:
        """See whether a request has started in the step that drafts gave way in."""
        num_running = len(self._scheduler.running)
        if num_running < self._hoped_for:
            self._in_vain = num_running
