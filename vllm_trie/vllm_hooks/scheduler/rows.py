"""Rows of all groups: their ids, their KV blocks and their places in vLLM's queues.

A row of a group that has started is in one of four states::

    state      status     where                     KV
    running    RUNNING    running list              yes; in flight, or its output is at the barrier
    waiting    PREEMPTED  queue (WAITING at first)  no; it is computed again from its tokens
    suspended  PREEMPTED  nowhere                   no; its output is at the barrier
    parked     PREEMPTED  nowhere                   no; its group is parked

A search step turns rows into their children outside vLLM's ``schedule``, when no row of the group
is in flight. A child without KV waits, unless its group is parked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.beam import Children
from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.scheduler.blocks import (
    check_references,
    copy_tails,
    fork_blocks,
    move_blocks,
    tail_of,
)
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.row_steps import (
    CANDIDATES,
    ROW_STEPS,
)
from vllm_trie.vllm_hooks.scheduler.unsent_rows import UnsentRows

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


@dataclass(slots=True)
class BeamCounters:
    """Events of native beam search since the scheduler was made, for tests and benchmarks."""

    groups: int = 0
    steps: int = 0
    rows_in_place: int = 0
    rows_moved: int = 0
    rows_forked: int = 0
    rows_reused: int = 0
    rows_recomputed: int = 0
    rows_dropped: int = 0
    rows_preempted: int = 0
    groups_parked: int = 0
    groups_failed: int = 0


class BeamRows:
    """Owner of the rows: makes, forks, moves, preempts and frees them.

    It writes the ``rows_*`` counters, and changes rows in the scheduler's ``requests``, ``running``
    list, waiting queues, ``finished_req_ids`` and KV cache manager; no other request.
    """

    def __init__(self, scheduler: Scheduler, counters: BeamCounters) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self.group_of: dict[str, BeamGroup] = {}
        """Row id to group. Only this class writes it."""
        self.unsent = UnsentRows()
        # Model Runner V2 keeps tokens on the device, a drafter keeps the text of a request, and
        # under asynchronous scheduling a worker finds a row's last token by its id.
        self._may_reuse = not (
            offered("fork_request")
            or scheduler.use_v2_model_runner
            or scheduler.scheduler_config.async_scheduling
            or scheduler.vllm_config.speculative_config is not None
        )

    # -- steps of a group --------------------------------------------------------------------------

    def start(self, group: BeamGroup) -> None:
        """Queue the group's first row, the prompt: behind other rows, before ordinary requests.

        A priority queue has an order of its own.
        """
        row = group.first_row()
        group.rows = [row]
        self.group_of[row.request_id] = group
        self._scheduler.add_request(row)
        waiting = self._scheduler.waiting
        rows = [each for each in waiting if each.request_id in self.group_of]
        waiting.remove_requests(rows)
        for each in reversed(rows):
            waiting.prepend_request(each)

    def take_outputs(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput
    ) -> tuple[SchedulerOutput, list[BeamGroup]]:
        """Take the outputs of rows out of a step's output, to their groups' barriers.

        Returns:
            The scheduler output without rows, for vLLM's own code, and the groups whose barrier is
            now complete.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        rest = copy(scheduler_output)
        rest.num_scheduled_tokens = {i: n for i, n in scheduled.items() if i not in self.group_of}
        sampled = model_output.sampled_token_ids
        arrived: dict[BeamGroup, list[str]] = {}
        for row_id, num_scheduled in scheduled.items():
            group = self.group_of.get(row_id)
            if group is None:
                continue
            row = self._scheduler.requests[row_id]
            row.num_in_flight_tokens -= num_scheduled
            index = model_output.req_id_to_index[row_id]
            if not sampled or not len(sampled[index]):
                continue  # a chunk of the prompt
            if drafts := scheduler_output.scheduled_spec_decode_tokens.get(row_id):
                # vLLM pads a resumed row with placeholder drafts, which are never accepted.
                row.num_computed_tokens -= len(drafts)
            group.outputs[row_id] = int(sampled[index][0])
            arrived.setdefault(group, []).append(row_id)
            if group.prefill_stats is None and (stats := row.take_prefill_stats()) is not None:
                stats.finalize(self._scheduler.kv_cache_manager.estimate_cached_tokens(row))
                group.prefill_stats = stats
        steps = getattr(scheduler_output, ROW_STEPS, ())
        for step, found in zip(steps, getattr(model_output, CANDIDATES, ()), strict=False):
            groups = (self.group_of.get(row_id) for row_id in step.row_ids)
            group = next((group for group in groups if group is not None), None)
            if group in arrived:
                group.take_candidates(arrived[group], step.row_ids, found)
        for group, row_ids in arrived.items():
            if not group.worker_selects:
                group.take_sampled(row_ids, model_output)
        return rest, [group for group in arrived if len(group.outputs) == len(group.rows)]

    def replace(self, group: BeamGroup, children: Children) -> None:
        """Put the rows of the children in the place of the group's rows, and empty its barrier.

        A row with children goes on as one of them, if possible as that of the token that the worker
        has appended, which costs nothing. The others take dropped rows, or are forks.
        """
        places, tokens = children.parents.tolist(), children.token_ids.tolist()
        parents, sampled = group.rows, [group.outputs[row.request_id] for row in group.rows]
        heirs: dict[int, int] = {}  # place of a parent -> rank of the child that takes its row
        for rank, place in enumerate(places):
            if place not in heirs or tokens[rank] == sampled[place]:
                heirs[place] = rank
        # Rows without children first: a fork may need their blocks.
        dropped = [row for place, row in enumerate(parents) if place not in heirs]
        reusable = self._reusable(group, dropped)
        kept = set(reusable)
        self.free([row for row in dropped if row not in kept])
        rows: dict[int, Request] = {}
        for place in [i for i in heirs if parents[i].status != RequestStatus.RUNNING]:  # suspended
            ranks = [rank for rank, parent in enumerate(places) if parent == place]
            rows |= {rank: self._new_row(group, parents[place], tokens[rank]) for rank in ranks}
            self._counters.rows_recomputed += len(ranks)
            self.free([parents[place]])
        branches = [
            rank for rank, place in enumerate(places) if heirs[place] != rank and rank not in rows
        ]
        reused = branches[: len(reusable)]
        rows |= zip(reused, reusable, strict=False)
        self._reuse(
            group, reusable, [parents[places[i]] for i in reused], [tokens[i] for i in reused]
        )
        self.free(reusable[len(reused) :])
        for rank in branches[len(reused) :]:
            rows[rank] = self._fork(group, parents[places[rank]], tokens[rank])
        for place, rank in heirs.items():
            if rank not in rows:
                in_place = tokens[rank] == sampled[place]
                rows[rank] = self._go_on(group, parents[place], tokens[rank], in_place)
        group.outputs, group.candidates = {}, []
        group.rows = [rows[rank] for rank in range(len(children))]
        self._gather(group)
        self.requeue(group)

    def _go_on(self, group: BeamGroup, row: Request, token_id: int, sampled: bool) -> Request:
        """Return the child that takes a row's blocks.

        Args:
            group: The group.
            row: The row.
            token_id: The child's token.
            sampled: Whether the worker has appended it to the row.
        """
        if not sampled or row.request_id in self.unsent.ids:
            return self._move(group, row, token_id)
        row.append_output_token_ids(token_id)
        self._counters.rows_in_place += 1
        return row

    def _reusable(self, group: BeamGroup, dropped: Sequence[Request]) -> list[Request]:
        """Return those of the dropped rows that may become children of other rows.

        The worker knows them, and their tail blocks begin in the prompt.
        """
        if not self._may_reuse:
            return []
        manager = self._scheduler.kv_cache_manager
        return [
            row
            for row in dropped
            if row.status == RequestStatus.RUNNING
            and row.request_id not in self.unsent.ids
            and (tail := tail_of(manager, row.request_id, row.num_computed_tokens)) is not None
            and row.num_computed_tokens - tail.num_filled < group.prompt.size
        ]

    def _reuse(
        self,
        group: BeamGroup,
        rows: Sequence[Request],
        parents: Sequence[Request],
        token_ids: Sequence[int],
    ) -> None:
        """Make the first of `rows`, which were dropped, children of `parents`.

        They keep their ids, their blocks and their places in the worker: only the generated tokens
        and their KV differ.
        """
        if not parents:
            return
        rows = rows[: len(parents)]
        num_computed = parents[0].num_computed_tokens  # of all rows of the group
        pairs = [
            (parent.request_id, row.request_id) for parent, row in zip(parents, rows, strict=True)
        ]
        targets, num_filled = copy_tails(self._scheduler.kv_cache_manager, pairs, num_computed)
        slots = (group.prompt.size - (num_computed - num_filled), num_filled)
        self.unsent.slots.update((block.block_id, slots) for block in targets)
        for row, parent, token_id in zip(rows, parents, token_ids, strict=True):
            group.give_tokens(row, parent, token_id)
            self.unsent.reused[row.request_id] = row
        self._counters.rows_reused += len(rows)

    def _new_row(self, group: BeamGroup, parent: Request, token_id: int) -> Request:
        """Return a child without KV, which the worker does not know."""
        row = group.child_row(parent, token_id)
        self._scheduler.requests[row.request_id] = row
        self.group_of[row.request_id] = group
        self.unsent.ids.add(row.request_id)
        return row

    def _fork(self, group: BeamGroup, parent: Request, token_id: int) -> Request:
        """Return a child that shares the parent's KV; without KV if slots or blocks run out."""
        scheduler = self._scheduler
        row = self._new_row(group, parent, token_id)
        num_computed = parent.num_computed_tokens
        manager = scheduler.kv_cache_manager
        if len(scheduler.running) < scheduler.max_num_running_reqs and fork_blocks(
            manager, parent.request_id, row.request_id, num_computed
        ):
            tail = tail_of(manager, row.request_id, num_computed)
            if tail is not None:
                self.unsent.slots[tail.block.block_id] = (0, tail.num_filled)
            row.num_computed_tokens = num_computed
            row.status = RequestStatus.RUNNING
            scheduler.running.append(row)
            self._counters.rows_forked += 1
        else:
            self._counters.rows_recomputed += 1
        return row

    def _move(self, group: BeamGroup, parent: Request, token_id: int) -> Request:
        """Hand the parent's blocks to a child with another token than the worker appended.

        The child has a new id: under asynchronous scheduling the worker finds a row's last token by
        its id.
        """
        scheduler = self._scheduler
        row = self._new_row(group, parent, token_id)
        move_blocks(scheduler.kv_cache_manager, parent.request_id, row.request_id)
        row.num_computed_tokens = parent.num_computed_tokens
        row.status = RequestStatus.RUNNING
        scheduler.running[scheduler.running.index(parent)] = row
        self.free([parent])
        self._counters.rows_moved += 1
        return row

    def _gather(self, group: BeamGroup) -> None:
        """Keep running rows where their group was: vLLM preempts from the end of the list."""
        running = self._scheduler.running
        mine = set(group.rows)
        first = next((i for i, row in enumerate(running) if row in mine), len(running))
        rest = [row for row in running if row not in mine]
        rows = [row for row in group.rows if row.status == RequestStatus.RUNNING]
        self._scheduler.running = [*rest[:first], *rows, *rest[first:]]

    # -- queues and blocks -------------------------------------------------------------------------

    def requeue(self, group: BeamGroup) -> None:
        """Queue the group's rows that have neither KV nor an output, unless it is parked."""
        if group.parked:
            return
        for row in reversed(group.rows):
            if row.status != RequestStatus.RUNNING and row.request_id not in group.outputs:
                self._scheduler.waiting.prepend_request(row)

    def preempt(self, group: BeamGroup) -> None:
        """Take the KV of all running rows of a group; out of the queues too if it is parked."""
        victims = [row for row in group.rows if row.status == RequestStatus.RUNNING]
        self._withdraw(group.rows if group.parked else victims)
        now = time.monotonic()
        for row in victims:
            self._scheduler._preempt_request(row, now)

    def after_preemption(self, row: Request, group: BeamGroup) -> None:
        """Give a row that vLLM has preempted and queued a new id, and its place.

        The worker must not resume the row: it has appended its own token to it, and under
        asynchronous scheduling it takes the last token of the step before by the row's id. An
        output on its way to the old id is ignored.
        """
        scheduler = self._scheduler
        self._counters.rows_preempted += 1
        scheduler.waiting.remove_request(row)  # a queue may be ordered by id
        old = row.request_id
        row.request_id = new = group.new_row_id()
        row.num_in_flight_tokens = row.num_stale_output_tokens = 0
        row.drop_stale_output = False
        del scheduler.requests[old], self.group_of[old]
        scheduler.requests[new] = row
        self.group_of[new] = group
        if old not in self.unsent.ids:
            scheduler.finished_req_ids.add(old)
        self.unsent.forget(old)
        self.unsent.ids.add(new)
        if old in group.outputs:
            group.outputs[new] = group.outputs.pop(old)  # only its children are computed again
        elif not group.parked:
            scheduler.waiting.prepend_request(row)

    def free(self, rows: list[Request]) -> None:
        """Give back all that rows hold, in whatever state they are."""
        self._withdraw(rows)
        for row in rows:
            row.status = RequestStatus.FINISHED_ABORTED
            self._scheduler._free_request(row)
            del self.group_of[row.request_id]
            self.unsent.forget(row.request_id)
        self._counters.rows_dropped += len(rows)

    def free_group(self, group: BeamGroup) -> None:
        """Free all rows of a group, also those of a step that failed half-way."""
        ids = [row_id for row_id, owner in self.group_of.items() if owner is group]
        self.free([self._scheduler.requests[row_id] for row_id in ids])

    def release_queued_copies(self) -> None:
        """Drop the copies that forks have queued, and free both of their ends.

        To be called when the rows are preempted or gone, so that nothing needs the copies.
        """
        self.unsent.slots = {}
        manager = self._scheduler.kv_cache_manager
        _, held = manager.take_kv_cache_block_copies()
        manager.block_pool.free_blocks(held)

    def _withdraw(self, rows: Collection[Request]) -> None:
        """Take rows out of the running list and the queues."""
        scheduler = self._scheduler
        waiting = [row for row in rows if row.status != RequestStatus.RUNNING]
        if len(waiting) < len(rows):
            gone = set(rows)
            scheduler.running = [row for row in scheduler.running if row not in gone]
        if waiting:
            scheduler.waiting.remove_requests(waiting)
            scheduler.kv_holding_waiting.remove_requests(waiting)
            scheduler.deferred_waiting.difference_update(waiting)

    def check_integrity(self, groups: Collection[BeamGroup]) -> None:
        """Assert what holds for the rows of all `groups` between two calls of the scheduler.

        - vLLM's requests and ``group_of`` hold exactly the rows of the started groups.
        - A row is in the state that this module's table gives, and in no other place.
        - No barrier is complete, and it holds outputs of the group's rows only.
        - Rows that the worker does not know exist.
        - Blocks have as many references as holders; queued copies hold both their ends.
        """
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        assert self.group_of == {row.request_id: group for group in groups for row in group.rows}
        assert self.unsent.ids <= self.group_of.keys(), "an unsent row does not exist"
        assert self.unsent.reused.keys() <= self.group_of.keys() - self.unsent.ids, (
            "a reused row is unknown"
        )
        running = Counter(row.request_id for row in scheduler.running)
        queued = Counter(r.request_id for r in (*scheduler.waiting, *scheduler.kv_holding_waiting))
        tables = [part.req_to_blocks for part in manager.coordinator.single_type_managers]
        for group in groups:
            row_ids = {row.request_id for row in group.rows}
            assert group.outputs.keys() < row_ids or not row_ids, f"{group.group_id}: no step taken"
            for row in group.rows:
                row_id = row.request_id
                runs, at_barrier = row.status == RequestStatus.RUNNING, row_id in group.outputs
                waits = not runs and not at_barrier and not group.parked
                assert scheduler.requests[row_id] is row
                assert running[row_id] == runs, f"{row_id}: {row.status}, runs {running[row_id]}x"
                assert queued[row_id] == waits, f"{row_id}: {row.status}, waits {queued[row_id]}x"
                assert runs or not any(table.get(row_id) for table in tables), f"{row_id} has KV"
                assert not at_barrier or not row.num_in_flight_tokens, f"{row_id} runs ahead"
        check_references(manager, chain.from_iterable(held for _, held in scheduler.deferred_frees))
