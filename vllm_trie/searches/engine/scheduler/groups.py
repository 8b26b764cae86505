"""Beam groups: intake, refusal and answers.

``admission.py`` decides when groups start. The functions of ``proxies.py`` pass their beams to
vLLM's scheduler and to the worker, and the outputs back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.refusal import RefusedError
from vllm_trie.searches.engine.beam_support import check_blocks
from vllm_trie.searches.engine.constraint import GroupSearch, constraints
from vllm_trie.searches.engine.scheduler import proxies
from vllm_trie.searches.engine.scheduler.admission import Admission
from vllm_trie.searches.engine.scheduler.beams import BeamProxy, EngineParts
from vllm_trie.searches.engine.scheduler.group import BeamGroup, error_output
from vllm_trie.searches.engine.scheduler.group_rules import GroupRules, has_rules
from vllm_trie.searches.engine.scheduler.proxies import BeamCounters
from vllm_trie.searches.engine.scheduler.stop_strings import make_stop_string_finder
from vllm_trie.searches.engine.scheduler.tables import num_blocks
from vllm_trie.searches.engine.scheduler.token_search import TokenSearch
from vllm_trie.searches.engine.search_wire import SELECTIONS, beam_spec, search_settings

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(f"vllm.{__name__}")

Outputs = dict[int, list[EngineCoreOutput]]
"""Client index to outputs."""

_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


class BeamGroups:
    """Owner of the groups: takes searches in, and answers.

    It writes the counters, and of the scheduler the searches among its ``requests`` and
    ``max_num_scheduled_tokens``.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.counters = BeamCounters()
        self._refused: list[Request] = []
        self.by_id: dict[str, BeamGroup] = {}
        """Request id to group, in order of arrival. Only this class writes it."""
        # Thousands may wait. A step looks at those that have started, and at those whose grammar
        # is not compiled.
        self._started: dict[str, BeamGroup] = {}
        self._without_grammar: dict[str, BeamGroup] = {}
        self._num_beams_queued = 0  # of the groups that have not started
        vllm_config = scheduler.vllm_config
        is_async = scheduler.scheduler_config.async_scheduling
        self.engine = EngineParts(
            scheduler.max_model_len,
            vllm_config.model_config.get_vocab_size(),
            scheduler.kv_cache_manager.coordinator.single_type_managers,
            num_blocks(scheduler.kv_cache_manager),
            scheduler.max_num_scheduled_tokens,
            on_device=bool(scheduler.use_v2_model_runner and is_async),
        )
        self.admission = Admission(scheduler, self.engine.num_blocks)
        self._opened = {kind: kind.open(vllm_config) for kind in constraints().values()}

    @property
    def idle(self) -> bool:
        """Whether no search waits for an answer."""
        return not self.by_id and not self._refused

    def num_further_beams(self) -> tuple[int, int]:
        """Return the beams that vLLM does not count as running requests, and as waiting ones.

        Groups that do not run wait with all their beams, refused requests for their answer.
        """
        groups = self._started.values()
        running = sum(group.search.num_rows - 1 for group in groups if group.runs)
        lost = sum(group.beam_width - 1 for group in groups if not group.runs)
        num_queued = len(self.by_id) - len(self._started)
        return running, self._num_beams_queued - num_queued + lost + len(self._refused)

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
            group = self._new_group(request)
        except Exception as error:
            self.refuse(request, error)
        else:
            self.by_id[request.request_id] = group
            self._num_beams_queued += group.beam_width
            if group.rules is not None and not group.rules.is_ready:
                self._without_grammar[request.request_id] = group
            self._scheduler.add_request(group.beams.proxy)

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
        except Exception as error:
            name, is_foreseen = group.request.request_id, isinstance(error, RefusedError)
            failed = "Beam search failed for request %s: %s"
            logger.error(failed, name, error, exc_info=not is_foreseen)
            self.counters.groups_failed += 1
            self._refused.append(group.request)
            self._remove(group)

    def _new_group(self, request: Request) -> BeamGroup:
        """Make a search's group.

        Raises:
            ValueError: The group could not run even alone.
        """
        engine, params = self.engine, request.sampling_params
        assert params is not None
        prompt = request.prompt_token_ids
        assert prompt is not None
        spec, rules = beam_spec(params), self._rules(request)
        max_new_tokens = min(request.max_tokens, engine.max_model_len - len(prompt))
        settings = search_settings(params, spec, max_new_tokens)
        group_search: GroupSearch
        if spec.constraint is None:
            model_config = self._scheduler.vllm_config.model_config
            find_stop_string = make_stop_string_finder(model_config, params)
            group_search = TokenSearch(
                settings, params, prompt, engine.vocab_size, find_stop_string, rules
            )
        else:
            group_search = spec.constraint.start(
                self._opened[type(spec.constraint)], params, settings
            )
        current_step, block_size = self._scheduler.current_step, self._scheduler.block_size
        group = BeamGroup(request, spec.n, group_search, engine, current_step, rules)
        sizes = group.beam_width, block_size, engine.num_blocks
        check_blocks(group.min_blocks, len(prompt), *sizes)
        return group

    def _rules(self, request: Request) -> GroupRules | None:
        assert request.sampling_params is not None
        if not has_rules(request.sampling_params):
            return None
        manager = self._scheduler.structured_output_manager
        return GroupRules(request, manager, self.engine.vocab_size)

    # -- a step ------------------------------------------------------------------------------------

    def before_schedule(self) -> None:
        """Prepare groups for the step that vLLM is about to schedule."""
        for name, group in [*self._without_grammar.items()]:
            with self._failing_alone(group):  # the grammar may not compile
                assert group.rules is not None
                group.rules.prepare(group.beam_width)
                if group.rules.is_ready:
                    del self._without_grammar[name]
        for group in [*self._started.values()]:
            # The worker drafted behind a prompt; the group goes on with the search's tokens.
            group.beams.proxy.spec_token_ids = []
            with self._failing_alone(group):  # a hypothesis may outgrow the KV cache
                group.beams.divide_if_needed(self._scheduler.kv_cache_manager)
        self.admission.begin_step(self._started.values())
        proxies.reserve_tokens(self._scheduler, self.engine.tokens_per_step)

    def lets_start(self, request: Request) -> bool:
        """Return whether a queued request may start in the step that vLLM is scheduling."""
        group = self.by_id[request.search_id] if isinstance(request, BeamProxy) else None
        return self.admission.lets_start(request, group)

    def after_schedule(self, output: SchedulerOutput) -> None:
        """Send the beams of the scheduled groups, and what selects their candidates. They do not
        run ahead of their outputs, as vLLM's asynchronous scheduler has let their proxies."""
        # vLLM may have passed over some that were let: they lack a LoRA slot, or blocks.
        for request in self.admission.let_requests():
            if isinstance(request, BeamProxy) and request.status == RequestStatus.RUNNING:
                group = self.by_id[request.search_id]
                if self._scheduler.log_stats:
                    group.request.record_event(EngineCoreEventType.SCHEDULED)
                if not group.started:  # the others have lost their blocks and go on
                    self._start(group)
        if self._scheduler.scheduler_config.async_scheduling:
            for group in self._started.values():
                if group.beams.proxy.request_id in output.num_scheduled_tokens:
                    group.beams.set_placeholders()
        self.admission.end_step()
        self._scheduler.max_num_scheduled_tokens = self.engine.tokens_per_step
        sent = proxies.send_beams(self._scheduler, output, self.counters)
        selections = []
        for group in [*self._started.values()]:
            with self._failing_alone(group):
                if (selection := group.selection(output, sent)) is not None:
                    selections.append(selection)
        if selections:
            setattr(output, SELECTIONS, selections)

    def take_outputs(
        self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput, outputs: Outputs
    ) -> SchedulerOutput:
        """Take a step's candidates and step the searches; add the answers of those that end, and of
        refused requests, to `outputs`.

        Returns:
            The scheduler output without groups, for vLLM's own code.
        """
        if self._started:
            scheduler_output, ready = proxies.take_outputs(
                self._scheduler, self._started.values(), scheduler_output, model_output
            )
            for group in ready:
                with self._failing_alone(group):
                    self._step(group, outputs)
        for request in self._refused:
            self._answer(request, error_output(request), outputs)
            self._forget(request)
        self._refused = []
        return scheduler_output

    def _start(self, group: BeamGroup) -> None:
        self.counters.groups += 1
        report: dict[str, object] | None = None
        if self._scheduler.log_stats:
            config = self._scheduler.vllm_config
            report = {
                "model_name": config.model_config.served_model_name,
                "engine": str(config.parallel_config.data_parallel_index),
                "searches": 1,
                "hypotheses": group.beam_width,
                "waiting_seconds": time.monotonic() - group.arrival,
            }
        self._num_beams_queued -= group.beam_width
        self._started[group.request.request_id] = group
        group.start(report)

    def preempt(self, proxy: BeamProxy) -> None:
        """Begin a group anew that vLLM has preempted."""
        group = self.by_id[proxy.search_id]
        if self._scheduler.log_stats:
            group.request.record_event(EngineCoreEventType.PREEMPTED)
        self.counters.beams_preempted += max(1, group.beams.num_beams)
        proxies.replace_preempted(self._scheduler, group)

    # -- answers -----------------------------------------------------------------------------------

    def _step(self, group: BeamGroup, outputs: Outputs) -> None:
        """Take a step of a group's search; add its answer to `outputs` if it ends, and after its
        first step that its prompt is computed."""
        children = group.advance()
        self.counters.steps += 1
        if group.search.done:
            self._answer(group.request, group.output(), outputs)
            self._remove(group)
            self._forget(group.request)
            return
        self.counters.beams_forked += len(children) - len(set(children.parents.tolist()))
        group.beams.take_children(children)
        if group.search.steps == 1:
            outputs.setdefault(group.request.client_index, []).append(group.first_output())

    def drop_finished(self, request_ids: Iterable[str]) -> None:
        """Forget groups and refused requests that vLLM has finished: no client waits for them."""
        for group in [self.by_id[name] for name in request_ids if name in self.by_id]:
            self._remove(group)
            self._forget(group.request)
        self._refused = [request for request in self._refused if not request.is_finished()]

    def _answer(self, request: Request, output: EngineCoreOutput, outputs: Outputs) -> None:
        assert output.finish_reason is not None
        request.status = _STATUS[output.finish_reason]
        outputs.setdefault(request.client_index, []).append(output)

    def _remove(self, group: BeamGroup) -> None:
        request_id = group.request.request_id
        proxies.free(self._scheduler, group.beams.proxy)
        del self.by_id[request_id]
        self._without_grammar.pop(request_id, None)
        if self._started.pop(request_id, None) is None:
            self._num_beams_queued -= group.beam_width

    def _forget(self, request: Request) -> None:
        self._scheduler.requests.pop(request.request_id, None)
        if self._scheduler.finished_req_ids_dict is not None:
            self._scheduler.finished_req_ids_dict[request.client_index].add(request.request_id)

    def check_integrity(self) -> None:
        """Assert what holds between two calls of the scheduler, for groups and their proxies.

        - A client waits for each group and each refused request, and vLLM's requests hold them.
        - Groups have at most ``beam_width`` beams.
        - What is kept of groups that have started or wait fits the groups.
        - No more requests run than there are slots.
        """
        scheduler = self._scheduler
        for name, group in self.by_id.items():
            assert group.search.num_rows <= group.beam_width, f"{name} is too wide"
            assert group.started == (name in self._started)
            is_ready = group.rules is None or group.rules.is_ready
            assert is_ready == (name not in self._without_grammar)
        assert {*self._started, *self._without_grammar} <= self.by_id.keys()
        queued = [group.beam_width for group in self.by_id.values() if not group.started]
        assert self._num_beams_queued == sum(queued)
        for request in (*self._refused, *(group.request for group in self.by_id.values())):
            assert not request.is_finished(), f"nobody waits for {request.request_id}"
            assert scheduler.requests[request.request_id] is request
        assert len(scheduler.running) <= scheduler.max_num_running_reqs
        self.admission.check_integrity(self.by_id.values())
        proxies.check_proxies(scheduler, self.by_id.values())
