"""Slots of the engine: which groups start, and which ordinary requests start next to them.

Groups and ordinary requests wait in vLLM's queue, by arrival or by priority. A group starts where
``beam_width`` slots are free, and reserves them to its end. The first group that lacks slots has a
claim on those that fall free, as in EASY backfilling (Lifka, 1995, "The ANL/IBM SP scheduling
system")::

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

A group starts where the KV blocks that all are expected to take then are there. One that has lost
its blocks goes on where they are there again, or nothing else runs, and nothing starts before it
that comes after it in the queue: otherwise they would take blocks from each other, and compute
again what they have lost. Blocks that a group of w beams

- is refused without: the prompt's full ones + w (`min_blocks`);
- is expected to take: those of its longest path + 2 w (`blocks_with`);
- goes on with: as many as it has lost + w (`blocks_to_go_on`);

each in every KV cache group, less what lies before a window. Where even so they do not suffice,
:mod:`.passes` divides its steps.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request, RequestStatus

from vllm_trie.searches.engine.scheduler.beams import BeamProxy
from vllm_trie.searches.engine.scheduler.group import BeamGroup

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

SOON = 64
"""Steps that slots may always wait for a group."""

_MAX_PASSED = 256
"""Requests that a step looks past to find some that may start."""


class Claim(NamedTuple):
    """Slots that fall free for the next group.

    Attributes:
        steps: Steps until the group is expected to start.
        spare: Slots that it leaves over then.
        num_let: Requests that the step had let before; `spare` counts them in.
    """

    steps: int
    spare: int
    num_let: int


class Admission:
    """Owner of the slots: decides what starts in a step.

    It writes ``max_num_active_reqs`` and ``deferred_waiting`` of the scheduler.
    """

    def __init__(self, scheduler: Scheduler, num_blocks: int) -> None:
        """Start with free slots; requests may hold `num_blocks` blocks."""
        self._scheduler, self._num_blocks = scheduler, num_blocks
        self.slots = scheduler.max_num_active_reqs
        self._tokens_per_step = scheduler.max_num_scheduled_tokens
        self._steps_per_token = 2 if scheduler.scheduler_config.async_scheduling else 1  # of groups

    def begin_step(self, started: Collection[BeamGroup]) -> None:
        """Count the slots and blocks of the step that vLLM is about to schedule.

        Args:
            started: The groups that have started.
        """
        scheduler, self._started = self._scheduler, started
        # Steps until what runs is expected to end, and its slots.
        self._ends = [(self._steps_of_group(group), group.beam_width) for group in started]
        self._ends += [
            (_expected(self._steps_left(request), request.num_output_tokens), 1)
            for request in scheduler.running
            if not isinstance(request, BeamProxy)
        ]
        self._free = self.slots - sum(slots for _, slots in self._ends)
        self._free -= scheduler.num_waiting_for_streaming_input
        self._let: list[tuple[Request, int, int]] = []  # with the most steps left, and slots
        self._passed: list[Request] = []
        self._claim: Claim | None = None
        self._num_proxies_queued = sum(not group.runs for group in started)
        self._is_alone = not started
        self._room = self._num_blocks - sum(map(self.expected_blocks, started))

    def lets_start(self, request: Request, group: BeamGroup | None = None) -> bool:
        """Return whether a queued request may start in the step that vLLM is scheduling.

        Args:
            request: The request.
            group: The group that it stands for, None if it is an ordinary one.
        """
        if group is None:
            steps_left, slots = self._steps_left(request), 1
            # One that was preempted has had its turn before.
            is_first = request.status != RequestStatus.PREEMPTED
            lets = self._has_slots(steps_left, slots, is_first)
        elif group.started:
            self._num_proxies_queued -= 1
            steps_left, slots = 0, 0  # it has reserved its slots
            lets = self._has_blocks_again(group)
        else:
            slots = group.beam_width
            steps_left = self._steps_per_token * group.search.settings.max_new_tokens
            lets = self._lets_group(group, steps_left)
        if lets and self._has_adapter(request):
            self._let.append((request, steps_left, slots))
            return True
        self._passed.append(request)
        is_end = not self._num_free() or len(self._passed) >= _MAX_PASSED
        lacks_blocks = group is not None and group.started
        if lacks_blocks or (is_end and self._num_proxies_queued <= 0):
            scheduler = self._scheduler
            scheduler.max_num_active_reqs = len(scheduler.running)  # vLLM looks no further
        return False

    def let_requests(self) -> list[Request]:
        """Return the requests that might start in this step, groups' proxies among them."""
        return [request for request, _, _ in self._let]

    def end_step(self) -> None:
        """Undo what holds during one step only."""
        self._scheduler.max_num_active_reqs = self.slots
        self._scheduler.deferred_waiting.difference_update(self._passed)

    def _has_adapter(self, request: Request) -> bool:
        """Return whether a request's LoRA adapter is in use or fits next to those that are.

        vLLM 0.32 counts the adapters of requests that it schedules in the step, and a search waits
        in some steps for its own tokens.
        """
        config = self._scheduler.lora_config
        if config is None or request.lora_request is None:
            return True
        used = [other.lora_request for other in (request, *self._scheduler.running)]
        return len({lora.lora_int_id for lora in used if lora}) <= config.max_loras

    def _lets_group(self, group: BeamGroup, steps_left: int) -> bool:
        rules, pool = group.rules, self._scheduler.kv_cache_manager.block_pool
        if rules is not None and not rules.is_ready:
            return False
        if self._claim is None and group.beam_width > self._num_free():
            self._claim = self._claim_of(group)
        if not self._has_slots(steps_left, group.beam_width):
            return False
        expected_blocks = self.expected_blocks(group)
        fits = expected_blocks <= self._room
        if not self._is_alone and not (fits and group.min_blocks <= pool.get_num_free_blocks()):
            self._room = -1  # nor does a later one start
            return False
        self._room -= expected_blocks
        self._is_alone = False
        return True

    def _has_blocks_again(self, group: BeamGroup) -> bool:
        """Return whether a group that has lost its blocks may go on.

        Others that go on have taken only some of theirs again.
        """
        scheduler = self._scheduler
        running = [other for other in self._started if other.runs]
        missing = sum(max(0, other.blocks_to_go_on - other.beams.num_held) for other in running)
        num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return not scheduler.running or num_free >= missing + group.blocks_to_go_on

    def expected_blocks(self, group: BeamGroup) -> int:
        """Return the KV blocks that a group is expected to come to hold."""
        steps, most = group.search.steps, group.search.settings.max_new_tokens
        return group.blocks_with(steps + _expected(most - steps, steps))

    # -- slots -------------------------------------------------------------------------------------

    def _taken(self, first: int = 0) -> list[tuple[int, int]]:
        """Return the most steps and the slots of what starts in this step, of those let since."""
        return [
            (steps_left, slots)
            for request, steps_left, slots in self._let[first:]
            if request.status == RequestStatus.RUNNING
        ]

    def _num_free(self) -> int:
        return self._free - sum(slots for _, slots in self._taken())

    def _has_slots(self, steps_left: int, slots: int, heeds_claim: bool = True) -> bool:
        """Return whether slots are free, and not claimed, or free again in time."""
        if slots > self._num_free():
            return False
        claim = self._claim
        if claim is None or steps_left <= claim.steps or not heeds_claim:
            return True
        late = sum(slots for steps, slots in self._taken(claim.num_let) if steps > claim.steps)
        return slots <= claim.spare - late

    def _claim_of(self, group: BeamGroup) -> Claim | None:
        """Return the claim of a group that lacks slots, None if it would not start soon."""
        ends = [*self._ends, *((_expected(steps, 0), slots) for steps, slots in self._taken())]
        spare = self._num_free() - group.beam_width
        waited = self._scheduler.current_step - group.arrival_step
        for steps, same in groupby(sorted(ends), key=itemgetter(0)):
            spare += sum(slots for _, slots in same)
            if spare >= 0:
                is_soon = steps <= max(SOON, waited // 2)
                return Claim(steps, spare, len(self._let)) if is_soon else None
        return None

    def _steps_left(self, request: Request) -> int:
        """Return the most steps that an ordinary request takes."""
        to_compute = request.num_tokens - request.num_computed_tokens
        prefill = cdiv(max(to_compute, 1), self._tokens_per_step)
        return prefill - 1 + request.max_tokens - request.num_output_tokens

    def _steps_of_group(self, group: BeamGroup) -> int:
        search = group.search
        steps_left = search.settings.max_new_tokens - search.steps
        return _expected(self._steps_per_token * steps_left, self._steps_per_token * search.steps)

    def check_integrity(self, groups: Collection[BeamGroup]) -> None:
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
