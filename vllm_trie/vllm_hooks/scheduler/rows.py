"""Rows of groups: children in place, forked, moved or computed again; freeing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.scheduler.blocks import fork_blocks, move_blocks
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.setup.support import cache_reason, reason_off, say_where_untested


@dataclass(slots=True)
class BeamCounters:
    """What the scheduler did for beam search since it was made; tests and benchmarks read it."""

    groups: int = 0
    steps: int = 0
    rows_in_place: int = 0
    rows_moved: int = 0
    rows_forked: int = 0
    rows_recomputed: int = 0
    rows_dropped: int = 0
    rows_preempted: int = 0
    groups_parked: int = 0
    groups_failed: int = 0


class BeamRows(Scheduler):
    """A scheduler's groups and rows, and what happens to rows in a step of the search."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beam_counters = BeamCounters()
        self._beam_off = reason_off(self.vllm_config) or cache_reason(self.kv_cache_config)
        say_where_untested(self.vllm_config)
        self._groups: dict[str, BeamGroup] = {}
        self._group_of_member: dict[str, BeamGroup] = {}
        self._group_of_row: dict[str, BeamGroup] = {}
        self._unsent: set[str] = set()  # rows that the worker does not know (any more)
        self._refused: list[Request] = []
        self._stalled = False
        self._base_max_active = self.max_num_active_reqs
        self._vocab_size = self.vllm_config.model_config.get_vocab_size()

    def _extend_running(
        self, group: BeamGroup, parent: Request, sampled: int, tokens: dict[int, int]
    ) -> dict[int, Request]:
        """Children of a row that has its KV: one stays in its place, the others are forks.

        Args:
            group: of the row.
            parent: the row.
            sampled: the token that the worker has appended to it.
            tokens: the children's tokens by rank.

        Returns:
            The children's rows by rank.
        """
        # The child of the token that the worker has appended itself costs nothing.
        heir = next((rank for rank, token_id in tokens.items() if token_id == sampled), None)
        in_place = heir is not None and parent.request_id not in self._unsent
        if heir is None:
            heir = next(iter(tokens))
        rows = {
            rank: self._fork(group, parent, token_id)
            for rank, token_id in tokens.items()
            if rank != heir
        }
        if in_place:
            parent.append_output_token_ids(tokens[heir])
            rows[heir] = parent
            self.beam_counters.rows_in_place += 1
        else:
            rows[heir] = self._move(group, parent, tokens[heir])
        return rows

    def _extend_suspended(
        self, group: BeamGroup, parent: Request, tokens: dict[int, int]
    ) -> dict[int, Request]:
        """Children of a row that lost its KV, by rank: all of them are computed again."""
        rows = {rank: self._new_row(group, parent, token_id) for rank, token_id in tokens.items()}
        self.beam_counters.rows_recomputed += len(rows)
        self._free_rows([parent])
        return rows

    def _new_row(self, group: BeamGroup, parent: Request, token_id: int) -> Request:
        """A child without KV, which the worker does not know."""
        row = group.child_row(parent, token_id)
        self.requests[row.request_id] = row
        self._group_of_row[row.request_id] = group
        self._unsent.add(row.request_id)
        return row

    def _fork(self, group: BeamGroup, parent: Request, token_id: int) -> Request:
        """A child that shares the parent's KV, or one to be computed if there is no room."""
        row = self._new_row(group, parent, token_id)
        num_computed = parent.num_computed_tokens
        has_slot = len(self.running) < self.max_num_running_reqs
        if not has_slot or not fork_blocks(
            self.kv_cache_manager, parent.request_id, row.request_id, num_computed
        ):
            self.beam_counters.rows_recomputed += 1
            return row  # stays preempted: computed again when there is room
        row.num_computed_tokens = num_computed
        row.status = RequestStatus.RUNNING
        self.running.append(row)
        self.beam_counters.rows_forked += 1
        return row

    def _move(self, group: BeamGroup, parent: Request, token_id: int) -> Request:
        """Hand the parent's blocks to a child with another token than the worker appended.

        A new row id, because under asynchronous scheduling the worker finds a row's last token by
        its id.
        """
        row = self._new_row(group, parent, token_id)
        move_blocks(self.kv_cache_manager, parent.request_id, row.request_id)
        row.num_computed_tokens = parent.num_computed_tokens
        row.status = RequestStatus.RUNNING
        self.running[self.running.index(parent)] = row
        self._free_rows([parent])
        self.beam_counters.rows_moved += 1
        return row

    def _gather_running(self, group: BeamGroup) -> None:
        """Keep the group's rows where the group was: vLLM preempts from the end of the list."""
        mine = {row.request_id for row in group.rows}
        first = next(
            (i for i, row in enumerate(self.running) if row.request_id in mine), len(self.running)
        )
        rest = [row for row in self.running if row.request_id not in mine]
        rows = [row for row in group.rows if row.status == RequestStatus.RUNNING]
        self.running = [*rest[:first], *rows, *rest[first:]]

    def _free_rows(self, rows: list[Request]) -> None:
        """Give back what rows hold, wherever they are."""
        if not rows:
            return
        running = {row.request_id for row in rows if row.status == RequestStatus.RUNNING}
        if running:
            self.running = [row for row in self.running if row.request_id not in running]
        self._unqueue(row for row in rows if row.status != RequestStatus.RUNNING)
        for row in rows:
            row.status = RequestStatus.FINISHED_ABORTED
            self._free_request(row)
            del self._group_of_row[row.request_id]
            self._unsent.discard(row.request_id)
        self.beam_counters.rows_dropped += len(rows)

    def _unqueue(self, rows: Iterable[Request]) -> None:
        """Take rows out of the queues of those that wait."""
        waiting = list(rows)
        if waiting:
            self.waiting.remove_requests(waiting)
            self.kv_holding_waiting.remove_requests(waiting)
            self.deferred_waiting.difference_update(waiting)
