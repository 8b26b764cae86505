"""What members of a group receive at its end: hypotheses or an error."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_trie.beam import Hypothesis
from vllm_trie.vllm_hooks.frontend.beam_options import SPEC_KEY
from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.scheduler.group import BeamGroup
from vllm_trie.vllm_hooks.scheduler.rows import BeamRows

RESULT_FIELD = "extension_result" if offered("extension_result") else "kv_transfer_params"
"""Field of an ``EngineCoreOutput`` in which a search's result travels to the front end."""

Outputs = dict[int, list[EngineCoreOutput]]
"""Client index to outputs."""


class BeamResults(BeamRows):
    """Ends groups and answers their members."""

    def _finish(self, group: BeamGroup, outputs: Outputs) -> None:
        hypotheses = group.search.hypotheses()
        for index, member in sorted(group.members.items()):
            if member.is_finished():
                continue
            hypothesis = hypotheses[index] if index < len(hypotheses) else None
            self._emit(group, member, hypothesis, outputs)
        self._remove(group)

    def _emit(
        self, group: BeamGroup, member: Request, hypothesis: Hypothesis | None, outputs: Outputs
    ) -> None:
        if hypothesis is None:  # a search that ended with fewer hypotheses than were asked for
            hypothesis = Hypothesis([], [], float("-inf"), 0.0, "length", None, [])
        by_token = hypothesis.reason == "stop" and not isinstance(hypothesis.stop, str)
        params = member.sampling_params
        assert params is not None
        result: dict[str, Any] = {
            "score": hypothesis.score,
            "cumulative_logprob": sum(hypothesis.logprobs),
            "steps": group.search.steps,
        }
        if group.search.trace is not None:
            result["trace"] = group.search.trace.to_dict()
        member.status = (
            RequestStatus.FINISHED_STOPPED if by_token else RequestStatus.FINISHED_LENGTH_CAPPED
        )
        outputs.setdefault(member.client_index, []).append(
            EngineCoreOutput(
                request_id=member.request_id,
                new_token_ids=hypothesis.token_ids,
                new_logprobs=group.logprobs_of(hypothesis),
                # A stop string is left to the front end, as for ordinary requests: it cuts the
                # text, and reports the string as the stop reason.
                finish_reason=FinishReason.STOP if by_token else FinishReason.LENGTH,
                stop_reason=(
                    hypothesis.stop if by_token and hypothesis.stop != params.eos_token_id else None
                ),
                events=member.take_events(),
                prefill_stats=group.prefill_stats,
                trace_headers=member.trace_headers,
                **{RESULT_FIELD: {SPEC_KEY: result}},
            )
        )

    def _fail(self, group: BeamGroup, outputs: Outputs) -> None:
        self.beam_counters.groups_failed += 1
        for member in group.members.values():
            if not member.is_finished():
                self._emit_error(member, outputs)
        self._remove(group)

    def _emit_refusals(self, outputs: Outputs) -> None:
        for member in self._refused:
            if not member.is_finished():
                self._emit_error(member, outputs)
                self._forget_member(member)
        self._refused = []

    def _emit_error(self, member: Request, outputs: Outputs) -> None:
        member.status = RequestStatus.FINISHED_ERROR
        outputs.setdefault(member.client_index, []).append(
            EngineCoreOutput(
                request_id=member.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                events=member.take_events(),
                trace_headers=member.trace_headers,
            )
        )

    def _remove(self, group: BeamGroup) -> None:
        """Forget a group; its members are finished or about to be."""
        mine = [row for row in self.requests.values() if row.request_id in self._group_of_row]
        self._free_rows([row for row in mine if self._group_of_row[row.request_id] is group])
        for member in group.members.values():
            self._forget_member(member)
        self._groups.pop(group.group_id, None)

    def _forget_member(self, member: Request) -> None:
        self.requests.pop(member.request_id, None)
        self._group_of_member.pop(member.request_id, None)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[member.client_index].add(member.request_id)
