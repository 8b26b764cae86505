"""vLLM's schedulers with native beam search.

A beam request is prefilled once as one row; from then on its group of rows takes one step of the
search whenever every row has an output. Rows are ordinary running requests to vLLM: they are
batched, chunked, preempted and prefix-cached by its own code. What this subclass adds is

- admission of whole groups (``beam_width`` rows must fit next to what runs),
- the step of the search: rows without children go, forks share blocks with their parent,
- telling the worker about rows it does not know,
- outputs: hypothesis ``i`` becomes the whole output of member ``i``.

Life of a row's KV::

    waiting --schedule--> running --output--> at the barrier --search step--> running (a child)
       ^                     |                     |
       +---- preempted ------+                     +-- preempted: *suspended*, its output is kept,
                                                       its children are recomputed

A search step happens outside vLLM's ``schedule``, so no row of the group is in flight then, also
under asynchronous scheduling: a row is scheduled again only after its group's step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from copy import copy
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.beam.group import BeamGroup, RowOutput
from vllm_trie.vllm_hooks.beam.request_spec import BeamSpec, beam_spec
from vllm_trie.vllm_hooks.beam.results import BeamResults, Outputs
from vllm_trie.vllm_hooks.beam.stop_strings import make_stop_string_finder

logger = init_logger(__name__)


class BeamScheduling(BeamResults):
    """Beam search on top of a scheduler class of vLLM; mixed in before it."""

    # ------------------------------------------------------------------ intake

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
        slots = min(self.max_num_running_reqs, self._base_max_active)
        if group.beam_width > slots:
            raise ValueError(
                f"beam_width must be at most max_num_seqs={slots}, got {group.beam_width}"
            )
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1
        if group.min_blocks > blocks:
            raise ValueError(
                f"beam_width={group.beam_width} with a prompt of {group.prompt.size} tokens needs "
                f"at least {group.min_blocks} KV blocks, the engine has {blocks}"
            )

    def get_num_unfinished_requests(self) -> int:
        unfinished = super().get_num_unfinished_requests()
        if (self._groups or self._refused) and self._pause_state == PauseState.UNPAUSED:
            # Groups that wait, are parked or wait for a step hold nothing in vLLM's own queues.
            unfinished += len(self._groups) + len(self._refused)
        return unfinished

    # ---------------------------------------------------------------- schedule

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self._groups:
            return super().schedule(throttle_prefills)
        self._unpark()
        self._break_stall()
        self._admit_groups()
        output = super().schedule(throttle_prefills)
        # Under asynchronous scheduling an empty step is usual while outputs are on their way.
        self._stalled = not (output.total_num_scheduled_tokens or self._anything_in_flight())
        if self._unsent:
            self._send_as_new(output)
        return output

    def _admit_groups(self) -> None:
        """Start groups that fit; keep the slots of started groups free of other requests."""
        started = [group for group in self._groups.values() if group.started]
        reserved = sum(group.beam_width for group in started)
        others = sum(1 for row in self.running if row.request_id not in self._group_of_row)
        pool = self.kv_cache_manager.block_pool
        room = pool.num_gpu_blocks - 1 - sum(group.expected_blocks for group in started)
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

    def _send_as_new(self, output: SchedulerOutput) -> None:
        """Move rows that the worker does not know from the cached to the new requests.

        A new request carries its tokens and its block table; its prompt is all it has so far, and
        from here on the scheduler counts its output tokens as the worker does.
        """
        cached = output.scheduled_cached_reqs
        unknown = [i for i, row_id in enumerate(cached.req_ids) if row_id in self._unsent]
        for new in output.scheduled_new_reqs:  # Model Runner V2 resumes requests as new ones
            self._unsent.discard(new.req_id)
        if not unknown:
            return
        for i in unknown:
            row_id = cached.req_ids[i]
            row = self.requests[row_id]
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=row_id,
                    prompt_token_ids=self._group_of_row[row_id].all_tokens(row),
                    mm_features=[],
                    sampling_params=row.sampling_params,
                    pooling_params=None,
                    block_ids=self.kv_cache_manager.get_block_ids(row_id),
                    num_computed_tokens=cached.num_computed_tokens[i],
                    lora_request=row.lora_request,
                    prefill_token_ids=row._all_token_ids if self.use_v2_model_runner else None,
                )
            )
            row.num_prompt_tokens = row.num_tokens
            row._output_token_ids.clear()
            self._unsent.discard(row_id)
            cached.resumed_req_ids.discard(row_id)
            cached.all_token_ids.pop(row_id, None)
        gone = set(unknown)
        kept = [i for i in range(len(cached.req_ids)) if i not in gone]
        for name in ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"):
            values = getattr(cached, name)
            setattr(cached, name, [values[i] for i in kept])
        if cached.new_token_ids:
            cached.new_token_ids = [cached.new_token_ids[i] for i in kept]
        cached.__dict__.pop("_req_id_to_num_output_tokens", None)

    # -------------------------------------------------- preemption and stalls

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

    def _rename(self, group: BeamGroup, row: Request) -> None:
        """Make a row without KV a stranger to the worker.

        The worker has appended its own token to the row, and under asynchronous scheduling it
        takes the last token of the step before by the row's id: the row cannot be resumed there.
        An output that is still on its way comes for an id that nobody knows, and is ignored.
        """
        old = row.request_id
        row.request_id = new = group.new_row_id()
        row.num_in_flight_tokens = row.num_stale_output_tokens = 0
        row.drop_stale_output = False
        del self.requests[old], self._group_of_row[old]
        self.requests[new] = row
        self._group_of_row[new] = group
        if old in group.outputs:
            group.outputs[new] = group.outputs.pop(old)
        if old in self._unsent:
            self._unsent.remove(old)
        else:
            self.finished_req_ids.add(old)
        self._unsent.add(new)

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
        rows = (row for group in self._groups.values() for row in group.rows)
        return any(request.num_in_flight_tokens for request in (*self.running, *rows))

    def _unpark(self) -> None:
        parked = [group for group in self._groups.values() if group.parked]
        if not parked:
            return
        active = [group for group in self._groups.values() if group.started and not group.parked]
        hungry = any(
            row.status == RequestStatus.PREEMPTED for group in active for row in group.rows
        )
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        group = parked[0]
        if active and (hungry or free < min(group.expected_blocks, self._num_blocks() // 2)):
            return
        group.parked = False
        for row in reversed(group.rows):
            if row.request_id not in group.outputs and row.status != RequestStatus.RUNNING:
                self.waiting.prepend_request(row)

    def _num_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if reset_running_requests and self._groups:
            # Forks of the last step still hold both ends of their copies. Their rows are preempted
            # now, so nobody needs the copies.
            _, held = self.kv_cache_manager.take_kv_cache_block_copies()
            self.kv_cache_manager.block_pool.free_blocks(held)
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    # ------------------------------------------------------------------ output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: Outputs = {}
        if self._group_of_row:
            scheduler_output = self._take_row_outputs(
                scheduler_output, model_runner_output, outputs
            )
        if self._refused:
            self._emit_refusals(outputs)
        if not self._groups and self.max_num_active_reqs != self._base_max_active:
            self.max_num_active_reqs = self._base_max_active
        result = super().update_from_output(scheduler_output, model_runner_output)
        for client, client_outputs in outputs.items():
            if client in result:
                result[client].outputs = [*result[client].outputs, *client_outputs]
            else:
                result[client] = EngineCoreOutputs(outputs=client_outputs)
        return result

    def _take_row_outputs(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        outputs: Outputs,
    ) -> SchedulerOutput:
        """Take what belongs to rows out of a step's output and step the groups that have all.

        Returns:
            The scheduler output without the rows, for vLLM's own code.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        row_ids = [row_id for row_id in scheduled if row_id in self._group_of_row]
        if not row_ids:
            return scheduler_output
        touched: dict[str, BeamGroup] = {}
        for row_id in row_ids:
            group = self._group_of_row[row_id]
            if self._take_row_output(group, row_id, scheduler_output, model_runner_output):
                touched[group.group_id] = group
        for group in touched.values():
            if len(group.outputs) == len(group.rows):
                try:
                    self._step(group, outputs)
                except Exception:
                    # One request must never take the server down.
                    logger.exception("Beam search failed for request %s", group.group_id)
                    self._fail(group, outputs)
        rest = copy(scheduler_output)
        mine = set(row_ids)
        rest.num_scheduled_tokens = {
            request_id: count for request_id, count in scheduled.items() if request_id not in mine
        }
        return rest

    def _take_row_output(
        self,
        group: BeamGroup,
        row_id: str,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> bool:
        """Note a row's output; whether it had one."""
        row = self.requests[row_id]
        num_scheduled = scheduler_output.num_scheduled_tokens[row_id]
        row.num_in_flight_tokens -= num_scheduled
        index = model_runner_output.req_id_to_index[row_id]
        sampled = model_runner_output.sampled_token_ids
        logprobs = model_runner_output.logprobs
        if not sampled or not len(sampled[index]):
            return False  # a chunk of the prompt
        drafts = scheduler_output.scheduled_spec_decode_tokens.get(row_id)
        if drafts:
            # vLLM pads a resumed row with placeholder drafts; they are never accepted.
            row.num_computed_tokens -= len(drafts)
        assert logprobs is not None
        place = index
        if logprobs.cu_num_generated_tokens is not None:
            place = logprobs.cu_num_generated_tokens[index]
        group.outputs[row_id] = RowOutput(int(sampled[index][0]), logprobs, place)
        if group.prefill_stats is None and row.prefill_stats is not None:
            group.prefill_stats = row.take_prefill_stats()
            group.prefill_stats.finalize(self.kv_cache_manager.estimate_cached_tokens(row))
        return True

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for row_id in self._group_of_row:
            # The worker drafted after its own token; the row goes on with the search's.
            self.requests[row_id].spec_token_ids = []

    # ---------------------------------------------------------- the search step

    def _step(self, group: BeamGroup, outputs: Outputs) -> None:
        children = group.search.advance(*group.candidates())
        self.beam_counters.steps += 1
        if group.search.done:
            self._finish(group, outputs)
            return
        old_rows, old_outputs = group.rows, group.outputs
        of_parent: dict[int, list[int]] = {}
        for rank, child in enumerate(children):
            of_parent.setdefault(child.parent, []).append(rank)
        # Rows without children first: a fork may need their blocks.
        dead = [row for i, row in enumerate(old_rows) if i not in of_parent]
        self._free_rows(dead)
        new_rows: list[Request | None] = [None] * len(children)
        for i, ranks in of_parent.items():
            parent = old_rows[i]
            sampled = old_outputs[parent.request_id].token_id
            if parent.status == RequestStatus.RUNNING:
                self._extend_running(group, parent, sampled, children, ranks, new_rows)
            else:
                self._extend_suspended(group, parent, children, ranks, new_rows)
        group.outputs = {}
        group.rows = [row for row in new_rows if row is not None]
        self._gather_running(group)
        for row in reversed(group.rows):
            if row.status != RequestStatus.RUNNING and not group.parked:
                self.waiting.prepend_request(row)

    # --------------------------------------------------------------------- end

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if not self._groups and not self._refused:
            return super().finish_requests(request_ids, finished_status)
        if request_ids is None:
            ids = list(self.requests)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        groups = {id(g): g for i in ids if (g := self._group_of_member.get(i)) is not None}
        # Rows are nobody's to finish: they go with their group.
        finished = super().finish_requests(
            [i for i in ids if i not in self._group_of_row], finished_status
        )
        for group in groups.values():
            if group.finished:
                self._remove(group)
        self._refused = [member for member in self._refused if not member.is_finished()]
        return finished


class TrieBeamScheduler(BeamScheduling, Scheduler):
    """vLLM's scheduler with native beam search."""


class AsyncTrieBeamScheduler(BeamScheduling, AsyncScheduler):
    """vLLM's asynchronous scheduler with native beam search.

    Ordinary requests run ahead of their outputs as ever. A row cannot: what it computes next is
    decided by its group's outputs. It therefore takes part in every other step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last_scheduled: dict[str, int] = {}  # of the last step that was not empty

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        for row_id in self._group_of_row:
            if row_id in scheduled:
                # Without a placeholder for its next token the row has nothing to compute until
                # its group has taken its step.
                row = self.requests[row_id]
                row.num_output_placeholders = 0
                row.spec_token_ids = []
        if not self.use_v2_model_runner:
            self._mend_resumed(scheduler_output)
        if scheduled:
            self._last_scheduled = scheduled

    def _mend_resumed(self, scheduler_output: SchedulerOutput) -> None:
        """Have a token computed again that the worker got wrong.

        Model Runner V1 takes the last token that it computes of a request from the last step that
        was not empty, if the request was in it. That is right unless the request was preempted in
        an empty step and comes back with a part of its tokens only. Empty steps are rare without
        beam search; beside it they are usual.
        """
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            request = self.requests[request_id]
            if request_id in self._last_scheduled and request.is_prefill_chunk:
                request.num_computed_tokens -= 1
