"""vLLM's schedulers with native beam search.

A search is one ordinary request to vLLM, its proxy, which vLLM batches, chunks, preempts and
prefix-caches. Once its prompt is computed it stands for all beams of the search, which are arrays.
Next to vLLM's own state there is one object, ``beam_groups``. The classes below only pass vLLM's
calls on to it::

    add_request          -> add
    schedule             -> before_schedule, vLLM's own, after_schedule
    _handle_blocked_...  -> vLLM's own, lets_start
    update_from_output   -> take_outputs, vLLM's own
    _preempt_request     -> vLLM's own, preempt
    finish_requests      -> vLLM's own, drop_finished
    get_request_counts   -> vLLM's own, num_further_beams

A search step happens outside ``schedule``. A proxy is scheduled again only after its group's step,
also under asynchronous scheduling, unless the device chooses the children of a plain search: then
one step is in flight whose beams the search hears of later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from vllm.config.scheduler import SchedulerConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.hooks.ledger.record import of_beams
from vllm_trie.hooks.start.limits import reason_off, switch_off
from vllm_trie.hooks.wire import extra_args_of, is_search
from vllm_trie.searches.engine.beam_support import cache_reason
from vllm_trie.searches.engine.constraint import constraints
from vllm_trie.searches.engine.scheduler.beams import BeamProxy
from vllm_trie.searches.engine.scheduler.groups import BeamGroups, Outputs
from vllm_trie.searches.engine.scheduler.proxies import allocate_slots

logger = init_logger(f"vllm.{__name__}")

_scheduler = of_beams("v1.core.sched.scheduler:Scheduler.")
_OF_DIFFUSION = "vllm.v1.core.sched.diffusion_scheduler."
"""Schedulers that vLLM sets for diffusion models by itself."""


class TrieBeamScheduler(Scheduler):
    """vLLM's scheduler with native beam search."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = cache_reason(self.vllm_config, self.kv_cache_config)
        if self.beam_off is None and reason:
            self.switch_off(reason)
        manager: Any = self.kv_cache_manager
        manager.allocate_slots = partial(allocate_slots, manager, manager.allocate_slots)
        self.beam_groups = BeamGroups(self)
        self.beam_counters = self.beam_groups.counters

    @property
    def beam_off(self) -> str | None:
        """Why it serves no native searches, None if it does."""
        return reason_off(self.vllm_config)

    def switch_off(self, reason: str) -> None:
        """Serve no native searches, as something showed at the start; log why."""
        logger.error("Native beam search is off, vLLM's own serves: %s", reason)
        switch_off(self.vllm_config, reason)

    @_scheduler.overrides("takes beam requests in")
    def add_request(self, request: Request) -> None:
        if is_search(request.sampling_params):
            self.beam_groups.add(request, self.beam_off)
        elif extra_args_of(request.sampling_params).keys() & {"beam_width", *constraints()}:
            unread = "options of beam search that vllm-trie has not read in the front end"
            self.beam_groups.refuse(request, ValueError(unread))
        else:
            super().add_request(request)

    @_scheduler.overrides("admits groups, sends beams to the worker")
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if not self.beam_groups.by_id:
            return super().schedule(throttle_prefills)
        self.beam_groups.before_schedule()
        output = super().schedule(throttle_prefills)
        self.beam_groups.after_schedule(output)
        return output

    @_scheduler.overrides("takes the candidates of beams and steps the searches")
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: Outputs = {}
        scheduler_output = self.beam_groups.take_outputs(
            scheduler_output, model_runner_output, outputs
        )
        result = super().update_from_output(scheduler_output, model_runner_output)
        for client, answers in outputs.items():
            of_client = result.setdefault(client, EngineCoreOutputs())
            of_client.outputs = [*answers, *of_client.outputs]
        return result

    @_scheduler.overrides("ordinary requests leave the slots of groups free")
    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            return False
        return not self.beam_groups.by_id or self.beam_groups.lets_start(request)

    @_scheduler.overrides("an aborted request takes its proxy along")
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if self.beam_groups.idle:
            return super().finish_requests(request_ids, finished_status)
        if request_ids is None:
            request_ids = self.requests
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        # A proxy goes with its group: vLLM finishes one whose inputs it cannot compute.
        requests = {name: self.requests.get(name) for name in request_ids}
        ids = {r.search_id if isinstance(r, BeamProxy) else name for name, r in requests.items()}
        finished = super().finish_requests(ids, finished_status)
        self.beam_groups.drop_finished(ids)
        return finished

    @_scheduler.overrides("a preempted group starts again with a new proxy")
    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        if isinstance(request, BeamProxy):
            self.beam_groups.preempt(request)

    @_scheduler.overrides("groups that wait and refused requests count as waiting")
    def get_request_counts(self) -> tuple[int, int]:
        # Metrics, the balance between data-parallel engines, and whether there is a next step.
        running, waiting = super().get_request_counts()
        more_running, more_waiting = self.beam_groups.num_further_beams()
        return running + more_running, waiting + more_waiting

    def check_integrity(self) -> None:
        """Assert the invariants of groups, proxies and KV blocks; call it between two steps."""
        self.beam_groups.check_integrity()


class AsyncTrieBeamScheduler(TrieBeamScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with native beam search.

    Ordinary requests run ahead of their outputs. Outputs of beams decide what they compute next:
    a search takes part in every other step, unless the device can choose for it.
    """


@of_beams().wraps(
    "config.scheduler:SchedulerConfig.get_scheduler_cls",
    "schedulers with beam search take the place of vLLM's own",
)
def get_scheduler_cls(original: Callable[..., Any], self: SchedulerConfig) -> Any:
    """Choose a scheduler with beam search where the user left ``scheduler_cls`` out."""
    if self.scheduler_cls is not None:
        if not str(self.scheduler_cls).startswith(_OF_DIFFUSION):
            logger.info_once(
                "Native beam search is off: scheduler_cls=%s was given; leave it out to have it. "
                "vLLM's own beam search is used.",
                str(self.scheduler_cls),
            )
        return original(self)
    return AsyncTrieBeamScheduler if self.async_scheduling else TrieBeamScheduler
