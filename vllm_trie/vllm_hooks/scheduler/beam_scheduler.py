"""vLLM's schedulers with native beam search.

A beam request is prefilled once as one row; from then on its group of rows takes one step of the
search whenever every row has an output. Rows are ordinary running requests to vLLM: they are
batched, chunked, preempted and prefix-cached by its own code. What is added, a mixin each, is

- `admission` of whole groups: ``beam_width`` rows must fit next to what runs,
- `stepping`: rows without children go, forks share blocks with their parent (`rows`),
- `unsent`: telling the worker about rows it does not know,
- `preemption`: rows and groups that lose their KV, and how they go on,
- `results`: hypothesis ``i`` becomes the whole output of member ``i``.

Life of a row's KV::

    waiting --schedule--> running --output--> at the barrier --search step--> running (a child)
       ^                     |                     |
       +---- preempted ------+                     +-- preempted: *suspended*, its output is kept,
                                                       its children are recomputed

A search step happens outside vLLM's ``schedule``, so no row of the group is in flight then, also
under asynchronous scheduling: a row is scheduled again only after its group's step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.config.scheduler import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.scheduler.admission import BeamAdmission
from vllm_trie.vllm_hooks.scheduler.preemption import BeamPreemption
from vllm_trie.vllm_hooks.scheduler.results import Outputs
from vllm_trie.vllm_hooks.scheduler.stepping import BeamStepping


class BeamScheduling(BeamAdmission, BeamPreemption, BeamStepping):
    """Beam search on top of a scheduler class of vLLM; mixed in before it."""

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

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        for row_id in self._group_of_row:
            # The worker drafted after its own token; the row goes on with the search's.
            self.requests[row_id].spec_token_ids = []

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
        if self._beam_off is not None:
            return
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


def scheduler_class(scheduler_config: SchedulerConfig) -> type[BeamScheduling]:
    """The scheduler with beam search for synchronous or asynchronous scheduling."""
    return AsyncTrieBeamScheduler if scheduler_config.async_scheduling else TrieBeamScheduler
