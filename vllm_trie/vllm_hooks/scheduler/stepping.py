"""Steps of the search: rows' outputs are taken until a group has all, then it takes its step."""

from __future__ import annotations

from copy import copy

from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.vllm_hooks.scheduler.group import BeamGroup, RowOutput
from vllm_trie.vllm_hooks.scheduler.results import BeamResults, Outputs

logger = init_logger(__name__)


class BeamStepping(BeamResults):
    """Takes the outputs of rows and makes the children of each step."""

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

    def _step(self, group: BeamGroup, outputs: Outputs) -> None:
        """One step of a group's search; the rows of its children take the place of its rows.

        Args:
            group: all its rows have an output.
            outputs: gets the hypotheses if the search ends.
        """
        children = group.search.advance(*group.candidates())
        self.beam_counters.steps += 1
        if group.search.done:
            self._finish(group, outputs)
            return
        old_rows, old_outputs = group.rows, group.outputs
        tokens_of_parent: dict[int, dict[int, int]] = {}  # by the child's rank
        for rank, child in enumerate(children):
            tokens_of_parent.setdefault(child.parent, {})[rank] = child.token_id
        # Rows without children first: a fork may need their blocks.
        self._free_rows([row for i, row in enumerate(old_rows) if i not in tokens_of_parent])
        new_rows: dict[int, Request] = {}
        for i, tokens in tokens_of_parent.items():
            parent = old_rows[i]
            if parent.status == RequestStatus.RUNNING:
                sampled = old_outputs[parent.request_id].token_id
                new_rows |= self._extend_running(group, parent, sampled, tokens)
            else:
                new_rows |= self._extend_suspended(group, parent, tokens)
        group.outputs = {}
        group.rows = [new_rows[rank] for rank in range(len(children))]
        self._gather_running(group)
        for row in reversed(group.rows):
            if row.status != RequestStatus.RUNNING and not group.parked:
                self.waiting.prepend_request(row)
