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
from vllm_trie.vllm_hooks.scheduler.group import MISSING, BeamGroup, error_output
from vllm_trie.vllm_hooks.scheduler.group_rules import GroupRules, has_rules
from vllm_trie.vllm_hooks.scheduler.items.catalogues import Catalogues
from vllm_trie.vllm_hooks.scheduler.proxies import BeamCounters, BeamProxies
from vllm_trie.vllm_hooks.scheduler.stop_strings import make_stop_string_finder
from vllm_trie.vllm_hooks.scheduler.tables import num_blocks
from vllm_trie.vllm_hooks.setup.beam_support import (
    catalogue_paths,
    check_blocks,
    check_slots,
    unsupported_rule,
)
from vllm_trie.vllm_hooks.wire import beam_spec, num_members

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
    """Owner of the groups: takes members in, parks groups, and answers members.

    It writes the ``groups*`` and ``steps`` counters and the members among the scheduler's
    ``requests``.
    """

    def __init__(self, scheduler: Scheduler, proxies: BeamProxies, counters: BeamCounters) -> None:
        self._scheduler = scheduler
        self._proxies = proxies
        self._counters = counters
        self.admission = Admission(scheduler, proxies)
        self._refused: list[Request] = []
        self.by_id: dict[str, BeamGroup] = {}
        """Group id to group, in order of arrival. Only this class writes it."""
        self.vocab_size = scheduler.vllm_config.model_config.get_vocab_size()
        self.catalogues = Catalogues(catalogue_paths(scheduler.vllm_config), self.vocab_size)

    @property
    def idle(self) -> bool:
        """Whether no member waits for an answer."""
        return not self.by_id and not self._refused

    def num_waiting_members(self) -> int:
        """Return the number of members of groups that have not started or are parked."""
        waiting = (group for group in self.by_id.values() if not group.started or group.parked)
        return sum(len(group.members) for group in waiting)

    # -- intake ------------------------------------------------------------------------------------

    def add(self, request: Request, off: str | None) -> None:
        """Add a member to its group, or refuse it; the first member makes the group.

        Args:
            request: The member.
            off: Why this engine has no native beam search, None if it has.
        """
        if self._scheduler.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        self._scheduler.requests[request.request_id] = request
        try:
            if off is not None:
                raise ValueError(f"native beam search is off: {off}")
            index, group_id = 0, request.request_id
            # "{index}_{parent request id}", see vLLM's ParentRequest
            if num_members(request.sampling_params) != 1:
                prefix, _, group_id = request.request_id.partition("_")
                index = int(prefix)
            if group_id not in self.by_id:
                self.by_id[group_id] = self._new_group(group_id, request)
        except Exception as error:
            self.refuse(request, error)
        else:
            self.by_id[group_id].members[index] = request

    def refuse(self, request: Request, error: Exception) -> None:
        """Answer a request, or a member, with an error: what it carries cannot be served."""
        is_foreseen = isinstance(error, ValueError)
        logger.error("Request %s refused: %s", request.request_id, error, exc_info=not is_foreseen)
        self._scheduler.requests[request.request_id] = request
        self._refused.append(request)

    @contextmanager
    def _failing_alone(self, group: BeamGroup) -> Iterator[None]:
        """Have an error fail this group alone, whose members get an error as their answer."""
        try:
            yield
        except Exception:
            logger.exception("Beam search failed for request %s", group.group_id)
            self._counters.groups_failed += 1
            self._refused += group.members.values()
            self._proxies.free_group(group)
            del self.by_id[group.group_id]

    def _new_group(self, group_id: str, member: Request) -> BeamGroup:
        """Make a member's group.

        Raises:
            ValueError: The group could not run even alone.
        """
        scheduler = self._scheduler
        assert member.sampling_params is not None
        spec = beam_spec(member.sampling_params)
        group = BeamGroup(
            group_id,
            spec,
            member,
            scheduler.max_model_len,
            self.vocab_size,
            scheduler.block_size,
            make_stop_string_finder(scheduler.vllm_config.model_config, member.sampling_params),
            self.catalogues,
            self._rules(member),
        )
        check_slots(group.beam_width, min(scheduler.max_num_running_reqs, self.admission.slots))
        check_blocks(
            group.prompt.size,
            group.beam_width,
            group.search.settings.max_new_tokens,
            scheduler.block_size,
            num_blocks(scheduler.kv_cache_manager),
        )
        return group

    def _rules(self, member: Request) -> GroupRules | None:
        assert member.sampling_params is not None
        if not has_rules(member.sampling_params):
            return None
        if reason := unsupported_rule(self._scheduler.vllm_config, member.sampling_params):
            raise ValueError(reason)
        manager = self._scheduler.structured_output_manager
        return GroupRules(member, manager, self.vocab_size)

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
        """Tell the worker what it needs to select the candidates of groups.

        With catalogues, the message also says that requests of the step may decode items.
        """
        selections = []
        for group in [*self.by_id.values()]:
            with self._failing_alone(group):
                if (selection := self._proxies.selection(group, output)) is not None:
                    selections.append(selection)
        if selections or self.catalogues:
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
            for member in group.members.values():
                member.record_event(EngineCoreEventType.SCHEDULED, now)
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
        """Take a step of a group's search; add the members' answers to `outputs` if it ends."""
        with self._failing_alone(group):
            children = group.advance()
            self._counters.steps += 1
            if not group.search.done:
                self._proxies.follow(group, children)
                return
            hypotheses = group.hypotheses()
            for index, member in sorted(group.members.items()):
                if not member.is_finished():
                    hypothesis = hypotheses[index] if index < len(hypotheses) else MISSING
                    self._answer(member, group.output(member, hypothesis), outputs)
            self._remove(group)

    def answer_refused(self, outputs: Outputs) -> None:
        """Add the errors of refused members to `outputs`."""
        for member in self._refused:
            if not member.is_finished():
                self._answer(member, error_output(member), outputs)
            self._forget(member)
        self._refused = []

    def drop_finished(self) -> None:
        """Forget groups and refused members that no client waits for any more."""
        for group in [group for group in self.by_id.values() if group.finished]:
            self._remove(group)
        self._refused = [member for member in self._refused if not member.is_finished()]

    def _answer(self, member: Request, output: EngineCoreOutput, outputs: Outputs) -> None:
        assert output.finish_reason is not None
        member.status = _STATUS[output.finish_reason]
        outputs.setdefault(member.client_index, []).append(output)

    def _remove(self, group: BeamGroup) -> None:
        self._proxies.free_group(group)
        for member in group.members.values():
            self._forget(member)
        del self.by_id[group.group_id]

    def _forget(self, member: Request) -> None:
        self._scheduler.requests.pop(member.request_id, None)
        if self._scheduler.finished_req_ids_dict is not None:
            self._scheduler.finished_req_ids_dict[member.client_index].add(member.request_id)

    def check_integrity(self) -> None:
        """Assert what holds between two calls of the scheduler, for groups and their proxies.

        - A member waits in each group, and vLLM's requests hold it; the same for refused members.
        - Groups have at most ``beam_width`` beams; only started groups are parked.
        - No more requests run than there are slots.
        """
        scheduler = self._scheduler
        waiting = [*self._refused]
        for group_id, group in self.by_id.items():
            waiting += group.members.values()
            assert not group.finished, f"nobody waits for {group_id}"
            assert group.search.num_rows <= group.beam_width, f"{group_id} is too wide"
            assert group.started or not group.parked, f"{group_id}: parked before its start"
        for member in waiting:
            assert member.is_finished() or scheduler.requests[member.request_id] is member
        assert len(scheduler.running) <= scheduler.max_num_running_reqs
        self.admission.check_integrity(self.by_id.values())
        self._proxies.check_integrity(self.by_id.values())
