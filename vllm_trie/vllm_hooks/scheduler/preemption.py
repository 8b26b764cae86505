"""Groups short of KV blocks: preempted rows, stalls, and groups that are parked."""

from __future__ import annotations

import time

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.scheduler.blocks import num_blocks
from vllm_trie.vllm_hooks.scheduler.unsent import UnsentRows


class BeamPreemption(UnsentRows):
    """Takes KV from rows when blocks run out, and gives groups a way on."""

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        group = self._group_of_row.get(request.request_id)
        if group is None:
            return
        self.beam_counters.rows_preempted += 1
        self.waiting.remove_request(request)  # a queue may be ordered by id
        self._rename(group, request)
        # If its output is here, nothing of it has to be computed again, only its children.
        if request.request_id not in group.outputs and not group.parked:
            self.waiting.prepend_request(request)

    def _break_stall(self) -> None:
        """Free blocks when nothing can be scheduled.

        Rows at the barrier hold blocks while a sibling waits for blocks. The youngest group that
        holds some gives them up: alone, its outputs are kept and only KV is lost; beside other
        groups, it is parked whole until they are done or there is room.
        """
        if not self._stalled or self._pause_state != PauseState.UNPAUSED:
            return
        started = [group for group in self._groups.values() if group.started and not group.parked]
        for group in reversed(started):
            victims = [row for row in group.rows if row.status == RequestStatus.RUNNING]
            if not victims:
                continue
            if len(started) > 1:
                group.parked = True
                self.beam_counters.groups_parked += 1
                self._unqueue(row for row in group.rows if row.status != RequestStatus.RUNNING)
            ids = {row.request_id for row in victims}
            self.running = [row for row in self.running if row.request_id not in ids]
            now = time.monotonic()
            for row in victims:
                self._preempt_request(row, now)
            return

    def _anything_in_flight(self) -> bool:
        """Whether outputs are on their way, of whatever request."""
        rows = (row for group in self._groups.values() for row in group.rows)
        return any(request.num_in_flight_tokens for request in (*self.running, *rows))

    def _unpark(self) -> None:
        """Let the oldest parked group go on when nobody else is short of blocks."""
        parked = [group for group in self._groups.values() if group.parked]
        if not parked:
            return
        active = [group for group in self._groups.values() if group.started and not group.parked]
        hungry = any(
            row.status == RequestStatus.PREEMPTED for group in active for row in group.rows
        )
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        group = parked[0]
        enough = min(group.expected_blocks, num_blocks(self.kv_cache_manager) // 2)
        if active and (hungry or free < enough):
            return
        group.parked = False
        for row in reversed(group.rows):
            if row.request_id not in group.outputs and row.status != RequestStatus.RUNNING:
                self.waiting.prepend_request(row)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests or not self._group_of_row:
            # Forks of the last step still hold both ends of their copies. Their rows are preempted
            # now or gone already, so nobody needs the copies.
            _, held = self.kv_cache_manager.take_kv_cache_block_copies()
            self.kv_cache_manager.block_pool.free_blocks(held)
        return super().reset_prefix_cache(reset_running_requests, reset_connector)
