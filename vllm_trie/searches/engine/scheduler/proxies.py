"""Proxies: one request in vLLM's scheduler for all beams of a group.

vLLM computes a proxy's prompt, orders it, and preempts it as any other request. When it asks for
the KV of the proxy's next token, the group takes that of all its beams (``allocate_slots``).
The worker gets the group's arrays in place of the proxy. A group that is preempted gets a new
proxy: outputs on their way to the old one are ignored.

The functions here change proxies in the scheduler's ``requests``, ``running`` list, waiting queues,
``finished_req_ids``, ``reset_preempted_req_ids`` and KV cache manager, no other request, and its
``max_num_scheduled_tokens``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.searches.engine.scheduler.beams import BeamProxy
from vllm_trie.searches.engine.scheduler.group import BeamGroup
from vllm_trie.searches.engine.scheduler.tables import check_references
from vllm_trie.searches.engine.search_wire import BEAM_STEPS, CANDIDATES, BeamStep

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler


@dataclass(slots=True)
class BeamCounters:
    """Events of native beam search since the scheduler was made, for tests and benchmarks."""

    groups: int = 0
    steps: int = 0
    steps_ahead: int = 0  # that the device has begun before the search heard of its choice
    beams_forked: int = 0
    beams_recomputed: int = 0
    beams_preempted: int = 0
    groups_failed: int = 0


# -- a step ----------------------------------------------------------------------------------------


def reserve_tokens(scheduler: Scheduler, budget: int) -> None:
    """Reserve the tokens of the beams that can run, of `budget`: vLLM counts one for each group."""
    manager = scheduler.kv_cache_manager
    for proxy in scheduler.running:
        if not isinstance(proxy, BeamProxy) or not (count := proxy.beams.num_to_schedule()):
            continue
        beams = proxy.beams
        if count <= budget and not beams.lacks_blocks_ahead(manager):
            budget -= count - 1
        else:
            proxy.next_decode_eligible_step = scheduler.current_step + 2
    scheduler.max_num_scheduled_tokens = budget


def send_beams(
    scheduler: Scheduler, output: SchedulerOutput, counters: BeamCounters
) -> Collection[str]:
    """Put the beams of the scheduled groups in the place of their proxies; return these."""
    scheduled = output.num_scheduled_tokens
    requests = {i: scheduler.requests.get(i) for i in scheduled}
    decoding = {
        i: request.beams
        for i, request in requests.items()
        if isinstance(request, BeamProxy) and request.beams.decodes
    }
    if not decoding:
        return ()
    updates = getattr(output, "encoder_input_updates", {})  # since vLLM 0.33, of Model Runner V2
    steps: list[BeamStep] = []
    copies = [copy for beams in decoding.values() for copy in beams.take_copies()]
    for proxy_id, beams in decoding.items():
        steps.append(beams.step())
        del scheduled[proxy_id]
        updates.pop(proxy_id, None)  # the worker gives the proxy's slot back, and its images
        output.total_num_scheduled_tokens += steps[-1].num_beams - 1
        counters.steps_ahead += beams.ahead is not None
        assert beams.level is not None
        if not beams.level.selects:
            counters.beams_recomputed += beams.num_beams
    cached = output.scheduled_cached_reqs
    _drop(cached, {i for i, name in enumerate(cached.req_ids) if name in decoding})
    setattr(output, BEAM_STEPS, steps)
    if copies:
        output.kv_cache_block_copies = [*(output.kv_cache_block_copies or ()), *copies]
    return decoding


def take_outputs(
    scheduler: Scheduler,
    groups: Collection[BeamGroup],
    scheduler_output: SchedulerOutput,
    model_output: ModelRunnerOutput,
) -> tuple[SchedulerOutput, list[BeamGroup]]:
    """Take a step's outputs of groups.

    Returns:
        The scheduler output without proxies, for vLLM's own code, and the groups whose search has
        all candidates of its step.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    of_proxy = {group.beams.proxy.request_id: group for group in groups}
    prompts = {i: of_proxy[i] for i in scheduled if i in of_proxy}
    rest = copy(scheduler_output)
    rest.num_scheduled_tokens = {i: n for i, n in scheduled.items() if i not in prompts}
    candidates = getattr(model_output, CANDIDATES, {})
    ready: list[BeamGroup] = []
    for step in getattr(scheduler_output, BEAM_STEPS, ()):
        if (group := of_proxy.get(step.proxy_id)) is None:
            continue
        beams = group.beams
        beams.proxy.num_in_flight_tokens -= 1
        assert beams.level is not None
        if beams.level.selects:
            selected = candidates.get(step.proxy_id)
            if selected is not None:
                selected = selected._replace(rows=selected.rows + beams.rows[0])
            group.take_candidates(selected)
        if beams.end_level():
            ready.append(group)
    for proxy_id, group in prompts.items():
        proxy = group.beams.proxy
        proxy.num_in_flight_tokens -= scheduled[proxy_id]
        scheduler._free_encoder_inputs(proxy)
        sampled = model_output.sampled_token_ids
        if not sampled or not len(sampled[model_output.req_id_to_index[proxy_id]]):
            continue  # a chunk of the prompt
        if drafts := scheduler_output.scheduled_spec_decode_tokens.get(proxy_id):
            # vLLM pads a resumed request with placeholder drafts, which are never accepted.
            proxy.num_computed_tokens -= len(drafts)
        group.end_prompt(scheduler.kv_cache_manager)
        if not group.search.steps:
            group.take_candidates(candidates.get(proxy_id))
            ready.append(group)
    return rest, ready


def _drop(cached: CachedRequestData, indices: set[int]) -> None:
    """Take the requests with these indices out."""
    for i in indices:
        cached.resumed_req_ids.discard(cached.req_ids[i])
        cached.all_token_ids.pop(cached.req_ids[i], None)
    lists: tuple[list[Any], ...] = (
        cached.req_ids,
        cached.new_token_ids,  # may be empty
        cached.new_block_ids,
        cached.num_computed_tokens,
        cached.num_output_tokens,
    )
    for values in lists:
        values[:] = [value for i, value in enumerate(values) if i not in indices]
    # A cached property of the old lists.
    cached.__dict__.pop("_req_id_to_num_output_tokens", None)


# -- queues ----------------------------------------------------------------------------------------


def replace_preempted(scheduler: Scheduler, group: BeamGroup) -> None:
    """Put a new proxy in the place of one that vLLM has preempted and queued."""
    proxy = group.beams.proxy
    scheduler.waiting.remove_request(proxy)
    scheduler.reset_preempted_req_ids.discard(proxy.request_id)
    del scheduler.requests[proxy.request_id]
    scheduler.finished_req_ids.add(proxy.request_id)
    group.restart()
    successor = group.beams.proxy
    scheduler.requests[successor.request_id] = successor
    scheduler.waiting.prepend_request(successor)


def free(scheduler: Scheduler, proxy: BeamProxy) -> None:
    """Give back all that a proxy holds, also after a step that failed half-way."""
    if scheduler.requests.get(proxy.request_id) is not proxy:
        return
    if proxy.status == RequestStatus.RUNNING:
        if proxy in scheduler.running:
            scheduler.running.remove(proxy)
    else:
        scheduler.waiting.remove_requests([proxy])
        scheduler.kv_holding_waiting.remove_requests([proxy])
        scheduler.deferred_waiting.discard(proxy)
    proxy.status = RequestStatus.FINISHED_ABORTED
    scheduler._free_request(proxy)


def check_proxies(scheduler: Scheduler, groups: Collection[BeamGroup]) -> None:
    """Assert what holds for the proxies of all `groups` between two calls of the scheduler.

    - vLLM's requests hold exactly one proxy of each group.
    - It runs or waits; it has KV only if it runs.
    - The beams' tables hold what vLLM thinks that the proxy holds.
    - Blocks have as many references as holders.
    """
    manager = scheduler.kv_cache_manager
    proxies = {request for request in scheduler.requests.values() if isinstance(request, BeamProxy)}
    assert proxies == {group.beams.proxy for group in groups}, "a proxy without a group"
    running = Counter(request.request_id for request in scheduler.running)
    queued = Counter(r.request_id for r in (*scheduler.waiting, *scheduler.kv_holding_waiting))
    tables = [part.req_to_blocks for part in manager.coordinator.single_type_managers]
    for group in groups:
        proxy, proxy_id, runs = group.beams.proxy, group.beams.proxy.request_id, group.runs
        assert scheduler.requests[proxy_id] is proxy
        assert running[proxy_id] == runs, f"{proxy_id}: {proxy.status}, {running[proxy_id]}x"
        assert queued[proxy_id] == (not runs), f"{proxy_id}: {proxy.status}, {queued[proxy_id]}x"
        assert runs or not any(table.get(proxy_id) for table in tables), f"{proxy_id} has KV"
        assert runs or not group.beams.decodes
        group.beams.check_integrity()
    check_references(manager, chain.from_iterable(held for _, held in scheduler.deferred_frees))


def allocate_slots(
    manager: KVCacheManager,
    original: Callable[..., KVCacheBlocks | None],
    request: Request,
    *args: object,
    **kwargs: object,
) -> KVCacheBlocks | None:
    """Allocate a request's KV slots as vLLM does, or those of all beams that it stands for."""
    if isinstance(request, BeamProxy) and request.beams.decodes:
        return manager.empty_kv_cache_blocks if request.beams.take_blocks(manager) else None
    return original(request, *args, **kwargs)
