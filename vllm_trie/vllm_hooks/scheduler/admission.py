"""Intake and admission of beam requests, group by group.

A group is started only where ``beam_width`` rows fit next to what runs. Groups start in order of
arrival, and neither overtake one another nor ordinary requests that came earlier.
"""

from __future__ import annotations

import time

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.frontend.beam_options import BeamSpec, beam_spec
from vllm_trie.vllm_hooks.scheduler.blocks import num_blocks
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.rows import BeamRows
from vllm_trie.vllm_hooks.scheduler.stop_strings import make_stop_string_finder

logger = init_logger(__name__)


class BeamAdmission(BeamRows):
    """Takes beam requests in and starts their groups."""

    def add_request(self, request: Request) -> None:
        spec = beam_spec(request.sampling_params)
        if spec is None:
            super().add_request(request)
            return
        self.requests[request.request_id] = request
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        try:
            self._add_member(request, spec)
        except ValueError as error:
            logger.error("Beam request %s refused: %s", request.request_id, error)
            self._refused.append(request)

    def _add_member(self, request: Request, spec: BeamSpec) -> None:
        """Add a member to its group; the first one makes the group.

        Raises:
            ValueError: This engine can never serve the group.
        """
        if self._beam_off is not None:
            raise ValueError(f"native beam search is off: {self._beam_off}")
        index, group_id = 0, request.request_id
        if spec.n > 1:  # "{index}_{parent request id}", see vLLM's ParentRequest
            prefix, _, group_id = request.request_id.partition("_")
            index = int(prefix)
        group = self._groups.get(group_id)
        if group is None:
            assert request.sampling_params is not None
            group = BeamGroup(
                group_id,
                spec,
                request,
                self.max_model_len,
                self._vocab_size,
                self.block_size,
                make_stop_string_finder(self.vllm_config.model_config, request.sampling_params),
            )
            self._check_fits(group)
            self._groups[group_id] = group
        group.members[index] = request
        self._group_of_member[request.request_id] = group

    def _check_fits(self, group: BeamGroup) -> None:
        """Refuse a group that could not run even alone.

        Raises:
            ValueError: too few sequences or KV blocks.
        """
        slots = min(self.max_num_running_reqs, self._base_max_active)
        if group.beam_width > slots:
            raise ValueError(
                f"beam_width must be at most max_num_seqs={slots}, got {group.beam_width}"
            )
        blocks = num_blocks(self.kv_cache_manager)
        if group.min_blocks > blocks:
            raise ValueError(
                f"beam_width={group.beam_width} with a prompt of {group.prompt.size} tokens needs "
                f"at least {group.min_blocks} KV blocks, the engine has {blocks}"
            )

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        # Metrics, and the balance between data-parallel engines, see groups that wait as well.
        idle = (group for group in self._groups.values() if not group.started or group.parked)
        return running, waiting + sum(len(group.members) for group in idle)

    def get_num_unfinished_requests(self) -> int:
        unfinished = super().get_num_unfinished_requests()
        if self._pause_state == PauseState.UNPAUSED:
            # Groups that wait, are parked or wait for a step hold nothing in vLLM's own queues.
            unfinished += len(self._groups) + len(self._refused)
        elif self._pause_state == PauseState.PAUSED_NEW and self._stalled:
            # Rows that wait for a sibling without KV, which is queued until the pause ends: so do
            # they, or the pause would wait for them for ever.
            unfinished -= sum(row.request_id in self._group_of_row for row in self.running)
        return unfinished

    def _admit_groups(self) -> None:
        """Start groups that fit; keep the slots of started groups free of other requests."""
        started = [group for group in self._groups.values() if group.started]
        reserved = sum(group.beam_width for group in started)
        others = sum(1 for row in self.running if row.request_id not in self._group_of_row)
        pool = self.kv_cache_manager.block_pool
        room = num_blocks(self.kv_cache_manager) - sum(group.expected_blocks for group in started)
        held_back = False
        for group in self._groups.values():
            if group.started:
                continue
            if self._overtakes(group):
                break
            if reserved + others + group.beam_width > self._base_max_active:
                held_back = reserved + group.beam_width <= self._base_max_active
                break
            if started and (
                group.expected_blocks > room
                or group.min_blocks > pool.get_num_free_blocks()
                or any(other.parked for other in started)
            ):
                break  # in order of arrival: no group overtakes another
            self._start(group)
            started.append(group)
            reserved += group.beam_width
            room -= group.expected_blocks
        rows = sum(len(group.rows) for group in started)
        self.max_num_active_reqs = self._base_max_active - (reserved - rows)
        if held_back and not self._head_was_preempted():
            # Ordinary requests would take every slot that falls free, and a wide group would never
            # see enough of them at once.
            self.max_num_active_reqs = min(self.max_num_active_reqs, len(self.running))

    def _overtakes(self, group: BeamGroup) -> bool:
        """Whether an ordinary request that came earlier still waits."""
        if not self.waiting:
            return False
        head = self.waiting.peek_request()
        if head in self.deferred_waiting or head.request_id in self._group_of_row:
            return False
        return head < group.prototype

    def _head_was_preempted(self) -> bool:
        return bool(self.waiting) and self.waiting.peek_request().status == RequestStatus.PREEMPTED

    def _start(self, group: BeamGroup) -> None:
        """Queue the group's first row, the prompt."""
        row = group.first_row()
        group.rows = [row]
        group.started = True
        self._group_of_row[row.request_id] = group
        self.beam_counters.groups += 1
        if self.log_stats:
            now = time.monotonic()
            for member in group.members.values():
                member.record_event(EngineCoreEventType.SCHEDULED, now)
        super().add_request(row)
