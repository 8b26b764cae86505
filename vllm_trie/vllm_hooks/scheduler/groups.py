"""Beam groups: intake, refusal, parking and answers. ``admission.py`` decides when they start.

A group that loses its blocks next to other groups is parked until they are done or there is room:
they would take them from each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.beam_wire import SELECTIONS
from vllm_trie.vllm_hooks.scheduler.admission import Admission
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup, error_output
from vllm_trie.vllm_hooks.scheduler.group_rules import GroupRules, has_rules
from vllm_trie.vllm_hooks.scheduler.items.catalogues import Catalogues
from vllm_trie.vllm_hooks.scheduler.proxies import BeamCounters, BeamProxies
from vllm_trie.vllm_hooks.scheduler.stop_strings import make_stop_string_finder
from vllm_trie.vllm_hooks.scheduler.tables import num_blocks
from vllm_trie.vllm_hooks.setup.beam_support import (
    beam_slots,
    catalogue_paths,
    check_blocks,
    check_slots,
    unsupported_rule,
)
from vllm_trie.vllm_hooks.wire import beam_spec

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(__name__)

Outputs = dict[int, list[EngineCoreOutput]]
"""Client index to outputs."""

_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class BeamGroups:
    """Owner of the groups: takes searches in, parks groups, and answers.

    It writes the ``groups*`` and ``steps`` counters and the searches among the scheduler's
    ``requests``.
    """

    def __init__(self, scheduler: Scheduler, proxies: BeamProxies, counters: BeamCounters) -> None:
        self._scheduler = scheduler
        self._proxies = proxies
        self._counters = counters
        self.admission = Admission(scheduler, proxies)
        self._refused: list[Request] = []
        self.by_id: dict[str, BeamGroup] = {}
        """Request id to group, in order of arrival. Only this class writes it."""
        self.vocab_size = scheduler.vllm_config.model_config.get_vocab_size()
        self.catalogues = Catalogues(catalogue_paths(scheduler.vllm_config), self.vocab_size)

    @property
    def idle(self) -> bool:
        """Whether no search waits for an answer."""
        return not self.by_id and not self._refused

    def num_waiting_beams(self) -> int:
        """Return the widths of the groups that have not started or are parked."""
        waiting = (group for group in self.by_id.values() if not group.started or group.parked)
        return sum(group.beam_width for group in waiting)

    # -- intake ------------------------------------------------------------------------------------

    def add(self, request: Request, off: str | None) -> None:
        """Make a group of a search, or refuse it.

        Args:
            request: The search's request.
            off: Why this engine has no native beam search, None if it has.
        """
        if self._scheduler.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        self._scheduler.requests[request.request_id] = request
        try:
            if off is not None:
                raise ValueError(f"native beam search is off: {off}")
            self.by_id[request.request_id] = self._new_group(request)
        except Exception as error:
            self.refuse(request, error)

    def refuse(self, request: Request, error: Exception) -> None:
        """Answer a request with an error: what it carries cannot be served."""
        is_foreseen = isinstance(error, ValueError)
        logger.error("Request %s refused: %s", request.request_id, error, exc_info=not is_foreseen)
        self._scheduler.requests[request.request_id] = request
        self._refused.append(request)

    @contextmanager
    def _failing_alone(self, group: BeamGroup) -> Iterator[None]:
        """Have an error fail this group alone, whose request gets an error as its answer."""
        try:
            yield
        except Exception:
            request_id = group.request.request_id
            logger.exception("Beam search failed for request %s", request_id)
            self._counters.groups_failed += 1
            self._refused.append(group.request)
            self._proxies.free_group(group)
            del self.by_id[request_id]

    def _new_group(self, request: Request) -> BeamGroup:
        """Make a search's group.

        Raises:
            ValueError: The group could not run even alone.
        """
        scheduler = self._scheduler
        params = request.sampling_params
        assert params is not None
        group = BeamGroup(
            request,
            beam_spec(params),
            scheduler.max_model_len,
            self.vocab_size,
            scheduler.block_size,
            make_stop_string_finder(scheduler.vllm_config.model_config, params),
            self.catalogues,
            self._rules(request),
        )
        check_slots(group.beam_width, beam_slots(scheduler.vllm_config))
        check_blocks(
            group.prompt.size,
            group.beam_width,
            group.search.settings.max_new_tokens,
            scheduler.block_size,
            num_blocks(scheduler.kv_cache_manager),
        )
        return group

    def _rules(self, request: Request) -> GroupRules | None:
        assert request.sampling_params is not None
        if not has_rules(request.sampling_params):
            return None
        if reason := unsupported_rule(self._scheduler.vllm_config, request.sampling_params):
            raise ValueError(reason)
        manager = self._scheduler.structured_output_manager
        return GroupRules(request, manager, self.vocab_size)

    # -- a step ------------------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Resume, park and start groups for the step that vLLM is about to schedule."""
        waiting = self._await_grammars()
        self._unpark()
        ready = [group for group in self._in_order() if group not in waiting]
        for group in self.admission.begin_step(ready):
            with self._failing_alone(group):
                self._start(group)

    def _await_grammars(self) -> set[BeamGroup]:
        """Return the groups whose grammar still compiles; refuse those whose grammar does not."""
        waiting = set()
        for group in [group for group in self.by_id.values() if not group.started]:
            with self._failing_alone(group):
                if group.rules is not None and not group.rules.prepare(group.beam_width):
                    waiting.add(group)
        return waiting

    def send_selections(self, output: SchedulerOutput) -> None:
        """Tell the worker what it needs to select the candidates of groups."""
        selections = []
        for group in [*self.by_id.values()]:
            with self._failing_alone(group):
                if (selection := self._proxies.selection(group, output)) is not None:
                    selections.append(selection)
        if selections:
            setattr(output, SELECTIONS, selections)

    def _in_order(self) -> list[BeamGroup]:
        return self.admission.in_order(self.by_id.values())

    def _start(self, group: BeamGroup) -> None:
        self._counters.groups += 1
        if self._scheduler.log_stats:
            now = time.monotonic()
            config = self._scheduler.vllm_config
            group.report = {
                "model_name": config.model_config.served_model_name,
                "engine": str(config.parallel_config.data_parallel_index),
                "searches": 1,
                "hypotheses": group.beam_width,
                "waiting_seconds": now - group.arrival,
            }
            group.request.record_event(EngineCoreEventType.SCHEDULED, now)
        self._proxies.start(group)

    # -- parking -----------------------------------------------------------------------------------

    def _unpark(self) -> None:
        """Let the oldest parked group go on if no other group is short of blocks."""
        group = next((group for group in self._in_order() if group.parked), None)
        if group is None:
            return
        if active := self._active():
            hungry = not all(other.runs for other in active)
            manager = self._scheduler.kv_cache_manager
            enough = min(group.expected_blocks, num_blocks(manager) // 2)
            if hungry or manager.block_pool.get_num_free_blocks() < enough:
                return
        group.parked = False
        self._proxies.requeue(group)

    def park(self, group: BeamGroup) -> None:
        """Park a group that has lost its KV, if others run: they would take it from each other."""
        if not group.parked and len(self._active()) > 1:
            group.parked = True
            self._counters.groups_parked += 1

    def _active(self) -> list[BeamGroup]:
        return [group for group in self._in_order() if group.started and not group.parked]

    def num_unfinished(self) -> int:
        """Return the number of requests to add to those that vLLM counts as unfinished.

        Groups that wait for slots or blocks have nothing in vLLM's own queues.
        """
        if self._scheduler.pause_state != PauseState.UNPAUSED:
            return 0
        return len(self.by_id) + len(self._refused)

    # -- answers -----------------------------------------------------------------------------------

    def step(self, group: BeamGroup, outputs: Outputs) -> None:
        """Take a step of a group's search; add its answer to `outputs` if it ends."""
        with self._failing_alone(group):
            children = group.advance()
            self._counters.steps += 1
            if not group.search.done:
                self._proxies.follow(group, children)
                return
            self._answer(group.request, group.output(), outputs)
            self._remove(group)

    def answer_refused(self, outputs: Outputs) -> None:
        """Add the errors of refused requests to `outputs`."""
        for request in self._refused:
            self._answer(request, error_output(request), outputs)
            self._forget(request)
        self._refused = []

    def drop_finished(self) -> None:
        """Forget groups and refused requests that no client waits for any more."""
        for group in [group for group in self.by_id.values() if group.request.is_finished()]:
            self._remove(group)
        self._refused = [request for request in self._refused if not request.is_finished()]

    def _answer(self, request: Request, output: EngineCoreOutput, outputs: Outputs) -> None:
        assert output.finish_reason is not None
        request.status = _STATUS[output.finish_reason]
        outputs.setdefault(request.client_index, []).append(output)

    def _remove(self, group: BeamGroup) -> None:
        self._proxies.free_group(group)
        self._forget(group.request)
        del self.by_id[group.request.request_id]

    def _forget(self, request: Request) -> None:
        self._scheduler.requests.pop(request.request_id, None)
        if self._scheduler.finished_req_ids_dict is not None:
            self._scheduler.finished_req_ids_dict[request.client_index].add(request.request_id)

    def check_integrity(self) -> None:
        """Assert what holds between two calls of the scheduler, for groups and their proxies.

        - A client waits for each group and each refused request, and vLLM's requests hold them.
        - Groups have at most ``beam_width`` beams; only started groups are parked.
        - No more requests run than there are slots.
        """
        scheduler = self._scheduler
        for name, group in self.by_id.items():
            assert group.search.num_rows <= group.beam_width, f"{name} is too wide"
            assert group.started or not group.parked, f"{name}: parked before its start"
        for request in (*self._refused, *(group.request for group in self.by_id.values())):
            assert not request.is_finished(), f"nobody waits for {request.request_id}"
            assert scheduler.requests[request.request_id] is request
        assert len(scheduler.running) <= scheduler.max_num_running_reqs
        self.admission.check_integrity(self.by_id.values())
        self._proxies.check_integrity(self.by_id.values())
