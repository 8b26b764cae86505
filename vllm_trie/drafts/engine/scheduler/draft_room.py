"""Room for drafts in a step whose tokens are limited, next to the prompts that it can compute.

vLLM schedules running requests first, drafts and all, and prompts with the tokens that are left of
``max_num_batched_tokens``.
"""

from __future__ import annotations

from copy import copy
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def cut_drafts(scheduler: Scheduler) -> None:
    """Cut the drafts of the running requests to equal shares of the step's room for drafts, so that
    they split no prefill that the step takes whole without them.

    Where the worker has the drafts already, it verifies as many tokens of each as are scheduled.
    """
    drafted = [request for request in scheduler.running if request.spec_token_ids]
    if not drafted:
        return
    share = _room(scheduler) // len(drafted)
    for request in drafted:
        if len(request.spec_token_ids) > share:
            request.spec_token_ids = request.spec_token_ids[:share]


def _room(scheduler: Scheduler) -> int:
    """Return the tokens of the step that drafts may have.

    A prefill that does not fit is split with drafts and without them. It leaves them half of its
    tokens, so that it goes on.
    """
    manager, room = scheduler.kv_cache_manager, scheduler.max_num_scheduled_tokens
    for request in scheduler.running:
        need = _tokens_to_compute(request)
        if need > room:
            return room // 2
        room -= need
    free = manager.block_pool.get_num_free_blocks() * scheduler.block_size
    waiting = filter(_can_start, chain(scheduler.kv_holding_waiting, scheduler.waiting))
    places = max(scheduler.max_num_active_reqs - len(scheduler.running), 0)
    for request in islice(waiting, places):
        need = _tokens_to_compute(request)
        if need > min(room, free) and not request.num_computed_tokens:
            silent: Any = copy(request)
            silent.kv_cache_report_mode = "incremental"  # or the look-up publishes its blocks
            need -= manager.get_computed_blocks(silent)[1]
        if need > free:
            return room  # it waits for memory, and so do those behind it
        if need > room:
            return room // 2
        room, free = room - need, free - need
    return room


def _tokens_to_compute(request: Request) -> int:
    """Return the tokens of a request that are not computed yet, without its draft."""
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens


def _can_start(request: Request) -> bool:
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        structured = request.structured_output_request
        return structured is not None and bool(structured.grammar)
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
