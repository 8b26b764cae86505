"""Proxies: one request in vLLM's scheduler for all beams of a group.

vLLM computes a proxy's prompt, orders it, and preempts it as any other request. When it asks for
the KV of the proxy's next token, the group takes that of all its beams (``allocate_slots``).
The worker gets the group's arrays in place of the proxy. A group that is preempted gets a new
proxy: outputs on their way to the old one are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.beam import Children
from vllm_trie.vllm_hooks.beam_wire import (
    BEAM_STEPS,
    CANDIDATES,
    SELECTIONS,
    BeamStep,
    TokenSelection,
)
from vllm_trie.vllm_hooks.ledger.record import of_beams
from vllm_trie.vllm_hooks.scheduler.beams import BeamProxy, GroupBeams
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.tables import (
    RangedCopies,
    check_references,
    num_blocks,
    ranged,
)

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
    groups_parked: int = 0
    groups_failed: int = 0


class BeamProxies:
    """Owner of the proxies and of their groups' beams.

    It writes the ``beams_*`` counters, and changes proxies in the scheduler's ``requests``,
    ``running`` list, waiting queues, ``finished_req_ids`` and KV cache manager; no other request.
    """

    def __init__(self, scheduler: Scheduler, counters: BeamCounters) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self._budget = scheduler.max_num_scheduled_tokens
        self._on_device = bool(
            scheduler.use_v2_model_runner
            and scheduler.scheduler_config.async_scheduling
            and scheduler.parallel_config.pipeline_parallel_size == 1
        )
        self._beams: dict[BeamGroup, GroupBeams] = {}
        self.group_of: dict[str, BeamGroup] = {}
        """Proxy id to group. Only this class writes it."""

    def start(self, group: BeamGroup) -> None:
        """Queue a group's proxy: behind other proxies, before ordinary requests.

        A priority queue has an order of its own.
        """
        most_blocks = num_blocks(self._scheduler.kv_cache_manager)
        beams = GroupBeams(group, self._budget, most_blocks, self._on_device)
        self._beams[group] = beams
        group.proxy = beams.proxy
        self.group_of[beams.proxy.request_id] = group
        self._scheduler.add_request(beams.proxy)
        waiting = self._scheduler.waiting
        proxies = [request for request in waiting if request.request_id in self.group_of]
        waiting.remove_requests(proxies)
        for proxy in reversed(proxies):
            waiting.prepend_request(proxy)

    # -- a step ------------------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Reserve the tokens of the beams that can run: vLLM counts one for each group."""
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        budget = self._budget
        for proxy in scheduler.running:
            if not isinstance(proxy, BeamProxy) or not proxy.beams.num_to_schedule():
                continue
            if not proxy.num_in_flight_tokens and proxy.beams.must_divide(manager):
                proxy.beams.divide()
            count = proxy.beams.num_to_schedule()
            if count <= budget and not proxy.beams.lacks_blocks_ahead(manager):
                budget -= count - 1
            else:
                proxy.next_decode_eligible_step = scheduler.current_step + 2
        scheduler.max_num_scheduled_tokens = budget

    def send(self, output: SchedulerOutput) -> None:
        """Put the beams of the scheduled groups in the place of their proxies."""
        self._scheduler.max_num_scheduled_tokens = self._budget
        scheduled = output.num_scheduled_tokens
        groups = [(i, self.group_of[i]) for i in scheduled if i in self.group_of]
        decoding = {i: self._beams[group] for i, group in groups if self._beams[group].decodes}
        if not decoding:
            return
        steps: list[BeamStep] = []
        copies = ranged(chain.from_iterable(beams.take_copies() for beams in decoding.values()))
        for proxy_id, beams in decoding.items():
            steps.append(beams.step())
            del scheduled[proxy_id]
            output.total_num_scheduled_tokens += steps[-1].num_beams - 1
            self._counters.steps_ahead += beams.ahead is not None
            assert beams.level is not None
            if not beams.level.selects:
                self._counters.beams_recomputed += beams.num_beams
        cached = output.scheduled_cached_reqs
        _drop(cached, {i for i, name in enumerate(cached.req_ids) if name in decoding})
        setattr(output, BEAM_STEPS, steps)
        if copies:
            others = output.kv_cache_block_copies or []
            ranges = [*([None] * len(others)), *copies.ranges]
            output.kv_cache_block_copies = RangedCopies([*others, *copies], ranges)

    def selection(self, group: BeamGroup, output: SchedulerOutput) -> Any:
        """Return what the worker needs to select candidates of a group in a step; None if nothing.

        To be called after :meth:`send`.
        """
        beams = self._beams.get(group)
        if beams is None:
            return None
        proxy_id = beams.proxy.request_id
        if not beams.decodes:
            is_last = not beams.proxy.is_prefill_chunk and not group.search.steps
            if is_last and proxy_id in output.num_scheduled_tokens:
                return group.selection(proxy_id, np.zeros(1, dtype=np.int64))
            return None
        if beams.level is None or not beams.level.selects:
            return None
        if any(step.proxy_id == proxy_id for step in getattr(output, BEAM_STEPS, ())):
            selection = group.selection(proxy_id, beams.rows)
            if beams.device_chooses and isinstance(selection, TokenSelection):
                stop_token_ids = group.search.settings.stop_token_ids
                selection = selection._replace(stop_token_ids=stop_token_ids)
                if beams.ahead is not None:
                    selection = selection._replace(totals=None)
            return selection
        return None

    def take_outputs(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> tuple[SchedulerOutput, list[BeamGroup]]:
        """Take a step's outputs of groups.

        Returns:
            The scheduler output without proxies, for vLLM's own code, and the groups whose search
            has all candidates of its step.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        rest = copy(scheduler_output)
        rest.num_scheduled_tokens = {i: n for i, n in scheduled.items() if i not in self.group_of}
        selections = getattr(scheduler_output, SELECTIONS, ())
        proxy_ids = (selection.proxy_id for selection in selections)
        candidates = dict(zip(proxy_ids, getattr(model_output, CANDIDATES, ()), strict=False))
        ready: list[BeamGroup] = []
        for step in getattr(scheduler_output, BEAM_STEPS, ()):
            if (group := self.group_of.get(step.proxy_id)) is None:
                continue
            beams = self._beams[group]
            beams.proxy.num_in_flight_tokens -= 1
            assert beams.level is not None
            if beams.level.selects:
                selected = candidates.get(step.proxy_id)
                if selected is not None and len(selected.rows):
                    selected = selected._replace(rows=selected.rows + beams.rows[0])
                group.candidates.append(selected)
            if beams.end_level():
                ready.append(group)
        for proxy_id, num_scheduled in scheduled.items():
            if (group := self.group_of.get(proxy_id)) is None:
                continue
            beams = self._beams[group]
            beams.proxy.num_in_flight_tokens -= num_scheduled
            sampled = model_output.sampled_token_ids
            if not sampled or not len(sampled[model_output.req_id_to_index[proxy_id]]):
                continue  # a chunk of the prompt
            if drafts := scheduler_output.scheduled_spec_decode_tokens.get(proxy_id):
                # vLLM pads a resumed request with placeholder drafts, which are never accepted.
                beams.proxy.num_computed_tokens -= len(drafts)
            self._end_prompt(beams)
            if not group.search.steps:
                group.candidates.append(candidates.get(proxy_id))
                ready.append(group)
        return rest, ready

    def _end_prompt(self, beams: GroupBeams) -> None:
        manager, group = self._scheduler.kv_cache_manager, beams.group
        stats = beams.proxy.take_prefill_stats()
        if group.prefill_stats is None and stats is not None:
            stats.finalize(manager.estimate_cached_tokens(beams.proxy))
            group.prefill_stats = stats
        beams.begin(manager)

    def follow(self, group: BeamGroup, children: Children) -> None:
        """Go on with the children that a group's search has chosen."""
        self._counters.beams_forked += len(children) - len(set(children.parents.tolist()))
        self._beams[group].follow(children)

    def settle(self, proxy_id: str) -> None:
        """Let a proxy that was scheduled under asynchronous scheduling wait for its group's step.

        Without a placeholder it has nothing to compute until then.
        """
        beams = self._beams[self.group_of[proxy_id]]
        beams.proxy.spec_token_ids = []
        beams.settle()

    # -- preemption --------------------------------------------------------------------------------

    def after_preemption(self, proxy: Request, group: BeamGroup) -> None:
        """Put a new proxy in the place of one that vLLM has preempted and queued."""
        scheduler, beams = self._scheduler, self._beams[group]
        self._counters.beams_preempted += max(1, beams.num_beams)
        scheduler.waiting.remove_request(proxy)
        scheduler.reset_preempted_req_ids.discard(proxy.request_id)
        del scheduler.requests[proxy.request_id], self.group_of[proxy.request_id]
        scheduler.finished_req_ids.add(proxy.request_id)
        beams.restart()
        group.candidates = []
        group.proxy = beams.proxy
        self.group_of[beams.proxy.request_id] = group
        scheduler.requests[beams.proxy.request_id] = beams.proxy
        self.requeue(group)

    def requeue(self, group: BeamGroup) -> None:
        """Queue the group's proxy if it has no KV, unless the group is parked."""
        proxy = self._beams[group].proxy
        if not group.parked and proxy.status != RequestStatus.RUNNING:
            self._scheduler.waiting.prepend_request(proxy)

    def free_group(self, group: BeamGroup) -> None:
        """Give back all that a group holds, also after a step that failed half-way."""
        beams = self._beams.pop(group, None)
        if beams is None:
            return
        self._withdraw(beams.proxy)
        beams.proxy.status = RequestStatus.FINISHED_ABORTED
        self._scheduler._free_request(beams.proxy)
        del self.group_of[beams.proxy.request_id]

    def num_further_beams(self) -> int:
        """Return the number of beams that vLLM does not count as running requests."""
        return sum(
            group.search.num_rows - 1
            for group, beams in self._beams.items()
            if beams.proxy.status == RequestStatus.RUNNING
        )

    def _withdraw(self, proxy: Request) -> None:
        """Take a proxy out of the running list or the queues."""
        scheduler = self._scheduler
        if proxy.status == RequestStatus.RUNNING:
            if proxy in scheduler.running:
                scheduler.running.remove(proxy)
        else:
            scheduler.waiting.remove_requests([proxy])
            scheduler.kv_holding_waiting.remove_requests([proxy])
            scheduler.deferred_waiting.discard(proxy)

    def check_integrity(self, groups: Collection[BeamGroup]) -> None:
        """Assert what holds for the proxies of all `groups` between two calls of the scheduler.

        - vLLM's requests, ``group_of`` and the groups hold exactly one proxy of each started group.
        - It runs, or waits, or is nowhere as its group is parked; it has KV only if it runs.
        - The beams' tables hold what vLLM thinks that the proxy holds.
        - Blocks have as many references as holders.
        """
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        started = [group for group in groups if group.started]
        assert self._beams.keys() == set(started), "a group without beams, or beams without a group"
        assert self.group_of == {self._beams[g].proxy.request_id: g for g in started}
        running = Counter(request.request_id for request in scheduler.running)
        queued = Counter(r.request_id for r in (*scheduler.waiting, *scheduler.kv_holding_waiting))
        tables = [part.req_to_blocks for part in manager.coordinator.single_type_managers]
        for group in started:
            beams = self._beams[group]
            proxy, proxy_id = beams.proxy, beams.proxy.request_id
            runs = proxy.status == RequestStatus.RUNNING
            waits = not runs and not group.parked
            assert group.proxy is proxy
            assert scheduler.requests[proxy_id] is proxy
            assert running[proxy_id] == runs, f"{proxy_id}: {proxy.status}, {running[proxy_id]}x"
            assert queued[proxy_id] == waits, f"{proxy_id}: {proxy.status}, {queued[proxy_id]}x"
            assert runs or not any(table.get(proxy_id) for table in tables), f"{proxy_id} has KV"
            assert runs or not beams.decodes
            beams.check_integrity()
        check_references(manager, chain.from_iterable(held for _, held in scheduler.deferred_frees))


def _drop(cached: CachedRequestData, places: set[int]) -> None:
    """Take the requests in these places out."""
    for i in places:
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
        values[:] = [value for i, value in enumerate(values) if i not in places]
    # A cached property of the old lists.
    cached.__dict__.pop("_req_id_to_num_output_tokens", None)


@of_beams("v1.core.kv_cache_manager:KVCacheManager.").wraps(
    "allocate_slots",
    "takes blocks for all beams of a group where vLLM schedules the request that stands for it",
)
def allocate_slots(
    original: Callable[..., KVCacheBlocks | None],
    self: KVCacheManager,
    request: Request,
    *args: object,
    **kwargs: object,
) -> KVCacheBlocks | None:
    if isinstance(request, BeamProxy) and request.beams.decodes:
        return self.empty_kv_cache_blocks if request.beams.take_blocks(self) else None
    return original(self, request, *args, **kwargs)
