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
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.beam import Child
from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.scheduler.blocks import (
    RangedCopies,
    check_references,
    copy_tail,
    fork_blocks,
    move_blocks,
    tail_of,
)
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.row_steps import REUSED_ROWS, ReusedRows, RowOutput

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
    """Owner of the rows: makes, forks, moves, preempts and frees them, and sends them anew.

    It writes the ``rows_*`` counters, and changes rows in the scheduler's ``requests``, ``running``
    list, waiting queues, ``finished_req_ids`` and KV cache manager; no other request.
    """

    def __init__(self, scheduler: Scheduler, counters: BeamCounters) -> None:
        self._scheduler = scheduler
        self._counters = counters
        self.group_of: dict[str, BeamGroup] = {}
        """Row id to group. Only this class writes it."""
        self._unsent: set[str] = set()  # rows that the worker does not know, or not any more
        self._reused: dict[str, Request] = {}  # rows whose new tokens the worker does not know
        self._ranges: dict[int, tuple[int, int]] = {}  # target of a queued copy -> slots
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
        touched: dict[str, BeamGroup] = {}
        for row_id, num_scheduled in scheduled.items():
            group = self.group_of.get(row_id)
            if group is None:
                continue
            row = self._scheduler.requests[row_id]
            row.num_in_flight_tokens -= num_scheduled
            index = model_output.req_id_to_index[row_id]
            sampled, logprobs = model_output.sampled_token_ids, model_output.logprobs
            if not sampled or not len(sampled[index]):
                continue  # a chunk of the prompt
            # vLLM pads a resumed row with placeholder drafts, which are never accepted.
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(row_id, ())
            row.num_computed_tokens -= len(drafts)
            assert logprobs is not None
            starts = logprobs.cu_num_generated_tokens
            place = index if starts is None else starts[index]
            group.outputs[row_id] = RowOutput(int(sampled[index][0]), logprobs, place)
            touched[group.group_id] = group
            if group.prefill_stats is None and (stats := row.take_prefill_stats()) is not None:
                stats.finalize(self._scheduler.kv_cache_manager.estimate_cached_tokens(row))
                group.prefill_stats = stats
        return rest, [g for g in touched.values() if len(g.outputs) == len(g.rows)]

    def replace(self, group: BeamGroup, children: Sequence[Child]) -> None:
        """Put the rows of the children in the place of the group's rows, and empty its barrier."""
        parents, outputs = group.rows, group.outputs
        tokens_of: dict[int, dict[int, int]] = {}  # parent -> child's rank -> token
        for rank, child in enumerate(children):
            tokens_of.setdefault(child.parent, {})[rank] = child.token_id
        # Rows without children first: a fork may need their blocks.
        dropped = [row for i, row in enumerate(parents) if i not in tokens_of]
        reusable = self._reusable(group, dropped)
        kept = set(reusable)
        self.free([row for row in dropped if row not in kept])
        rows: dict[int, Request] = {}
        for i, tokens in tokens_of.items():
            parent = parents[i]
            if parent.status == RequestStatus.RUNNING:
                sampled = outputs[parent.request_id].token_id
                rows |= self._extend_running(group, parent, sampled, tokens, reusable)
            else:  # suspended
                rows |= {
                    rank: self._new_row(group, parent, token) for rank, token in tokens.items()
                }
                self._counters.rows_recomputed += len(tokens)
                self.free([parent])
        self.free(reusable)
        group.outputs = {}
        group.rows = [rows[rank] for rank in range(len(children))]
        self._gather(group)
        self.requeue(group)

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
            and row.request_id not in self._unsent
            and (tail := tail_of(manager, row.request_id, row.num_computed_tokens)) is not None
            and row.num_computed_tokens - tail.num_filled < group.prompt.size
        ]

    def _reuse(self, group: BeamGroup, row: Request, parent: Request, token_id: int) -> None:
        """Make a dropped row a child of another one.

        It keeps its id, its blocks and its place in the worker: only the generated tokens and their
        KV differ.
        """
        num_computed = parent.num_computed_tokens
        manager = self._scheduler.kv_cache_manager
        tail = copy_tail(manager, parent.request_id, row.request_id, num_computed)
        first = group.prompt.size - (num_computed - tail.num_filled)
        self._ranges[tail.block.block_id] = (first, tail.num_filled)
        group.give_tokens(row, parent, token_id)
        self._reused[row.request_id] = row
        self._counters.rows_reused += 1

    def _extend_running(
        self,
        group: BeamGroup,
        parent: Request,
        sampled: int,
        tokens: dict[int, int],
        reusable: list[Request],
    ) -> dict[int, Request]:
        """Return the children of a row that has KV: one takes its blocks, the others are forks.

        Args:
            group: Group of the row.
            parent: The row.
            sampled: Token that the worker has appended to it.
            tokens: Rank to token of the children. The result has the same keys.
            reusable: Dropped rows; those that become children are taken out.
        """
        # The child with the worker's own token costs nothing.
        free = [rank for rank, token_id in tokens.items() if token_id == sampled]
        heir = free[0] if free else next(iter(tokens))
        rows: dict[int, Request] = {}
        for rank, token_id in tokens.items():
            if rank == heir:
                continue
            if reusable:
                rows[rank] = reusable.pop()
                self._reuse(group, rows[rank], parent, token_id)
            else:
                rows[rank] = self._fork(group, parent, token_id)
        if free and parent.request_id not in self._unsent:
            parent.append_output_token_ids(sampled)
            self._counters.rows_in_place += 1
            rows[heir] = parent
        else:
            rows[heir] = self._move(group, parent, tokens[heir])
        return rows

    def _new_row(self, group: BeamGroup, parent: Request, token_id: int) -> Request:
        """Return a child without KV, which the worker does not know."""
        row = group.child_row(parent, token_id)
        self._scheduler.requests[row.request_id] = row
        self.group_of[row.request_id] = group
        self._unsent.add(row.request_id)
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
                self._ranges[tail.block.block_id] = (0, tail.num_filled)
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
        self._reused.pop(old, None)
        if old in self._unsent:
            self._unsent.remove(old)
        else:
            scheduler.finished_req_ids.add(old)
        self._unsent.add(new)
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
            self._unsent.discard(row.request_id)
            self._reused.pop(row.request_id, None)
        self._counters.rows_dropped += len(rows)

    def free_group(self, group: BeamGroup) -> None:
        """Free all rows of a group, also those of a step that failed half-way."""
        ids = [row_id for row_id, owner in self.group_of.items() if owner is group]
        self.free([self._scheduler.requests[row_id] for row_id in ids])

    def release_queued_copies(self) -> None:
        """Drop the copies that forks have queued, and free both of their ends.

        To be called when the rows are preempted or gone, so that nothing needs the copies.
        """
        self._ranges = {}
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

    # -- the worker --------------------------------------------------------------------------------

    def send_changes(self, output: SchedulerOutput) -> None:
        """Move rows that the worker does not know from a step's cached to its new requests.

        Tells the worker, too, the tokens of reused rows, and which slots the step's copies need.

        A new request carries its tokens and its block table. All its tokens become its prompt; from
        here on the scheduler counts its output tokens as the worker does.
        """
        if copies := output.kv_cache_block_copies:
            ranges = [self._ranges.get(each.dst_block_id) for each in copies]
            output.kv_cache_block_copies = RangedCopies(copies, ranges)
            self._ranges = {}
        if self._reused:
            setattr(output, REUSED_ROWS, self._take_reused())
        self._unsent.difference_update(new.req_id for new in output.scheduled_new_reqs)
        cached = output.scheduled_cached_reqs
        unknown = [i for i, row_id in enumerate(cached.req_ids) if row_id in self._unsent]
        scheduler = self._scheduler
        for i in unknown:
            row_id = cached.req_ids[i]
            row = scheduler.requests[row_id]
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=row_id,
                    # An array: workers copy it many times faster than a list.
                    prompt_token_ids=self.group_of[row_id].all_tokens(row),  # type: ignore[arg-type]
                    mm_features=[],
                    sampling_params=row.sampling_params,
                    pooling_params=None,
                    block_ids=scheduler.kv_cache_manager.get_block_ids(row_id),
                    num_computed_tokens=cached.num_computed_tokens[i],
                    lora_request=row.lora_request,
                    prefill_token_ids=row._all_token_ids if scheduler.use_v2_model_runner else None,
                )
            )
            row.num_prompt_tokens = row.num_tokens
            row._output_token_ids.clear()
            self._unsent.discard(row_id)
        if unknown:
            _drop(cached, set(unknown))

    def _take_reused(self) -> list[ReusedRows]:
        rows_of: dict[BeamGroup, list[Request]] = {}
        for row_id, row in self._reused.items():
            rows_of.setdefault(self.group_of[row_id], []).append(row)
        self._reused = {}
        return [
            ReusedRows(
                [row.request_id for row in rows],
                group.prompt.size,
                np.array([row._all_token_ids[group.prompt.size :] for row in rows], dtype=np.int32),
            )
            for group, rows in rows_of.items()
        ]

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
        assert self._unsent <= self.group_of.keys(), "an unsent row does not exist"
        assert self._reused.keys() <= self.group_of.keys() - self._unsent, "a reused row is unknown"
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
