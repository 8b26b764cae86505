"""Slots of the engine: which groups start, and which ordinary requests start next to them.

A group starts where ``beam_width`` slots are free, and reserves them to its end. Groups and
ordinary requests start in vLLM's order: by arrival, or by priority. The first group that lacks
slots has a claim on those that fall free, as in EASY backfilling (Lifka, 1995, "The ANL/IBM SP
scheduling system")::

    slots
      |#### long request ########################|
      |### ends ###|  free until the claim ......|  group starts
      |## ends #|  <- a request that ends before |
      +------------------------------------------+-----> steps
      now                           `steps` of the claim

A request that arrived later takes a slot under a claim if it ends in time, or if the claim leaves
the slot over. A claim holds only if the group starts soon: within ``SOON`` steps, or half of the
steps that the group has waited. So a group idles slots for at most as long as it was passed over,
and an old group is not passed over any more.

A running request is expected to run as long again as it has run, at least ``SOON`` steps, and not
beyond its ``max_tokens``: default limits are far above usual lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.scheduler.beams import BeamProxy
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.tables import num_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

SOON = 64
"""Steps that slots may always wait for a group."""

_MAX_PASSED = 256
"""Requests that a step looks past to find some that may start."""


@dataclass(slots=True)
class Claim:
    """Slots that fall free for the next group.

    Attributes:
        steps: Steps until the group is expected to start.
        spare: Slots that it leaves over then.
    """

    steps: int
    spare: int


class Admission:
    """Owner of the slots: decides what starts in a step.

    It writes ``max_num_active_reqs`` and ``deferred_waiting`` of the scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.slots = scheduler.max_num_active_reqs
        self._tokens_per_step = scheduler.max_num_scheduled_tokens
        self._steps_per_token = 2 if scheduler.scheduler_config.async_scheduling else 1  # of groups
        # Of the step that is being scheduled:
        self._free = 0  # slots for ordinary requests
        self._claim: Claim | None = None
        self._num_proxies_queued = 0
        self._let: dict[Request, bool] = {}  # -> whether it takes a spare slot of the claim
        self._passed: list[Request] = []

    def in_order(self, groups: Iterable[BeamGroup]) -> list[BeamGroup]:
        """Return the groups in the order in which they start, from their order of arrival."""
        if self._scheduler.policy == SchedulingPolicy.PRIORITY:
            return sorted(groups, key=lambda group: group.request)
        return list(groups)

    # -- a step ------------------------------------------------------------------------------------

    def begin_step(self, groups: Sequence[BeamGroup]) -> list[BeamGroup]:
        """Return the groups to start now, and settle the slots of the step to be scheduled.

        Args:
            groups: All groups, in order.
        """
        scheduler = self._scheduler
        started = [group for group in groups if group.started]
        ends = [(self._steps_of_group(group), group.beam_width) for group in started]
        ends += [
            (_expected(self._steps_left(request), request.num_output_tokens), 1)
            for request in scheduler.running
            if not isinstance(request, BeamProxy)
        ]
        self._free = self.slots - sum(width for _, width in ends)
        self._free -= scheduler.num_waiting_for_streaming_input
        self._claim, self._let, self._passed = None, {}, []
        self._num_proxies_queued = sum(not group.runs and not group.parked for group in started)
        return self._groups_to_start(groups, started, ends)

    def _groups_to_start(
        self, groups: Sequence[BeamGroup], started: list[BeamGroup], ends: list[tuple[int, int]]
    ) -> list[BeamGroup]:
        manager = self._scheduler.kv_cache_manager
        room = num_blocks(manager) - sum(group.expected_blocks for group in started)
        num_free_blocks = manager.block_pool.get_num_free_blocks()
        crowded = any(group.parked for group in started)
        num_started = len(started)
        starting: list[BeamGroup] = []
        passed = False
        for group in groups:
            if group.started:
                continue
            width = group.beam_width
            if self._overtakes(group):
                break
            if width > self._free:
                if not passed:
                    self._claim = self._claim_of(group, ends)
                passed = True
                continue
            steps_left = self._steps_per_token * group.search.settings.max_new_tokens
            if not self._leaves_claim(steps_left, width):
                continue
            if (num_started or starting) and (
                group.expected_blocks > room or group.min_blocks > num_free_blocks or crowded
            ):
                break
            starting.append(group)
            room -= group.expected_blocks
            self._free -= width
            self._num_proxies_queued += 1
            if self._claim is not None and steps_left > self._claim.steps:
                self._claim.spare -= width
        return starting

    def lets_start(self, request: Request) -> bool:
        """Return whether a queued request may start in the step that vLLM is scheduling."""
        if isinstance(request, BeamProxy):
            self._num_proxies_queued -= 1
            return True  # its group has reserved the slot
        running = [each for each in self._let if each.status == RequestStatus.RUNNING]
        scheduler = self._scheduler
        if len(running) >= self._free:
            self._passed.append(request)
            if self._num_proxies_queued <= 0:
                scheduler.max_num_active_reqs = len(scheduler.running)  # vLLM looks no further
            return False
        steps_left = self._steps_left(request)
        in_time = self._claim is None or steps_left <= self._claim.steps
        # One that was preempted has had its turn before.
        if not in_time and request.status != RequestStatus.PREEMPTED:
            assert self._claim is not None
            if self._claim.spare <= sum(self._let[each] for each in running):
                self._passed.append(request)
                if self._num_proxies_queued <= 0 and len(self._passed) >= _MAX_PASSED:
                    scheduler.max_num_active_reqs = len(scheduler.running)
                return False
        self._let[request] = not in_time
        return True

    def end_step(self) -> None:
        """Undo what holds during one step only."""
        self._scheduler.max_num_active_reqs = self.slots
        self._scheduler.deferred_waiting.difference_update(self._passed)

    # -- claims ------------------------------------------------------------------------------------

    def _overtakes(self, group: BeamGroup) -> bool:
        """Return whether an earlier ordinary request still waits."""
        scheduler = self._scheduler
        for request in scheduler.waiting:
            if request not in scheduler.deferred_waiting and not isinstance(request, BeamProxy):
                return request < group.request
        return False

    def _claim_of(self, group: BeamGroup, ends: list[tuple[int, int]]) -> Claim | None:
        """Return the claim of a group that lacks slots, None if it would not start soon.

        Args:
            group: The group.
            ends: Expected steps and slots of everything that runs.
        """
        spare = self._free - group.beam_width
        for steps, same in groupby(sorted(ends), key=itemgetter(0)):
            spare += sum(slots for _, slots in same)
            if spare >= 0:
                waited = self._scheduler.current_step - group.arrival_step
                soon = steps <= max(SOON, waited // 2)
                return Claim(steps, spare) if soon else None
        return None

    def _leaves_claim(self, steps_left: int, slots: int) -> bool:
        claim = self._claim
        return claim is None or steps_left <= claim.steps or slots <= claim.spare

    def _steps_left(self, request: Request) -> int:
        """Return the most steps that an ordinary request takes."""
        to_compute = request.num_tokens - request.num_computed_tokens
        prefill = cdiv(max(to_compute, 1), self._tokens_per_step)
        return prefill - 1 + request.max_tokens - request.num_output_tokens

    def _steps_of_group(self, group: BeamGroup) -> int:
        search = group.search
        steps_left = search.settings.max_new_tokens - search.steps
        return _expected(self._steps_per_token * steps_left, self._steps_per_token * search.steps)

    def check_integrity(self, groups: Iterable[BeamGroup]) -> None:
        """Assert what holds between two calls of the scheduler.

        - The slots that started groups reserve exist, and ordinary requests leave them free.
        - vLLM sees all slots.
        """
        scheduler = self._scheduler
        used = sum(group.beam_width for group in groups if group.started)
        assert used <= self.slots, f"{used} slots are reserved, {self.slots} exist"
        used += sum(not isinstance(request, BeamProxy) for request in scheduler.running)
        assert used <= self.slots, f"{used} slots are taken or reserved, {self.slots} exist"
        assert scheduler.max_num_active_reqs == self.slots


def _expected(most_steps: int, steps_done: int) -> int:
    """Return the steps that something is expected to go on."""
    return min(most_steps, max(steps_done, SOON))
