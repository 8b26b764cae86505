"""One beam request inside the scheduler: its search, its rows and the answers to its members."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.beam import BeamSearch, Children, Hypothesis, num_raw_candidates
from vllm_trie.beam.search import StopStringFinder
from vllm_trie.items.step import Continuations
from vllm_trie.vllm_hooks.ledger.extension_points import offered
from vllm_trie.vllm_hooks.scheduler.group_rules import GroupRules
from vllm_trie.vllm_hooks.scheduler.items.catalogues import Catalogues, ItemStep
from vllm_trie.vllm_hooks.scheduler.items.item_rows import ItemRows
from vllm_trie.vllm_hooks.scheduler.row_steps import (
    SelectionStep,
    StepCandidates,
    at_rows,
    merged,
    of_sampler,
)
from vllm_trie.vllm_hooks.setup.beam_support import check_inputs, min_blocks
from vllm_trie.vllm_hooks.wire import REPORT, SPEC_KEY, BeamSpec, row_params, search_settings

RESULT_FIELD = "extension_result" if offered("extension_result") else "kv_transfer_params"
"""Field of an ``EngineCoreOutput`` in which a search's result travels to the front end."""

MISSING = Hypothesis([], [], float("-inf"), 0.0, "length", None, np.zeros((0, 3), dtype=np.int64))
"""Answer to a member for which the search found no hypothesis."""


class BeamGroup:
    """State of one beam request.

    ``BeamGroups`` writes ``members``, ``parked`` and ``report``, ``Admission`` ``waited_steps``,
    ``BeamRows`` ``rows``, ``outputs``, ``candidates`` and ``prefill_stats``. ``rows[i]`` is row
    ``i`` of the search.
    """

    def __init__(
        self,
        group_id: str,
        spec: BeamSpec,
        member: Request,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        find_stop_string: StopStringFinder | None,
        catalogues: Catalogues,
        worker_selects: bool = False,
        rules: GroupRules | None = None,
    ) -> None:
        params = member.sampling_params
        assert params is not None
        check_inputs(member)
        prompt = member.prompt_token_ids
        assert prompt is not None
        self.group_id = group_id
        self.beam_width = spec.options.beam_width
        self.members: dict[int, Request] = {}
        self.prototype = member
        self.prompt = np.asarray(prompt, dtype=np.int32)
        max_new_tokens = min(member.max_tokens, max_model_len - len(prompt))
        self.num_logprobs = params.logprobs
        self.num_candidates: int | None = None  # of each row; None: of all rows together
        self.rules = rules
        if spec.options.items is None:
            settings = search_settings(params, spec, max_new_tokens)
            self.items: ItemRows | None = None
            self.search = BeamSearch(settings, prompt, find_stop_string)
            if params.logprobs or not (worker_selects and self.search.takes_best_of_all):
                self.num_candidates = max(
                    num_raw_candidates(settings, prompt, vocab_size),
                    min(params.logprobs or 0, vocab_size),
                )
        else:
            self.items = ItemRows(catalogues, spec, params, max_new_tokens)
            self.search = self.items.search
            max_new_tokens = self.search.settings.max_new_tokens
        self.worker_selects = worker_selects
        asked = None if worker_selects else self.num_candidates  # of vLLM's sampler
        self.row_params: SamplingParams = row_params(asked, max_new_tokens)
        self.min_blocks = min_blocks(len(prompt), self.beam_width, max_new_tokens, block_size)
        # The trie is little larger than its longest path: hypotheses meet a few tokens back.
        self.expected_blocks = cdiv(len(prompt) + max_new_tokens, block_size) + 2 * self.beam_width

        self.report: dict[str, Any] | None = None
        self.arrival = time.monotonic()
        self.waited_steps = 0
        self.parked = False
        self.rows: list[Request] = []
        self.outputs: dict[str, int] = {}
        """Row id to the token that the worker has appended to the row, for rows at the barrier."""
        self.candidates: list[StepCandidates | None] = []
        """Those of the rows at the barrier, by step of the worker; None if it failed."""
        self.prefill_stats: PrefillStats | None = None
        self._num_rows_made = 0
        self._history: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def started(self) -> bool:
        """Whether the engine has rows of this group."""
        return bool(self.rows)

    @property
    def finished(self) -> bool:
        """Whether no member waits for an answer."""
        return all(member.is_finished() for member in self.members.values())

    def first_row(self) -> Request:
        """Return the row of the prompt."""
        member = self.prototype
        return Request(
            self.new_row_id(),
            member.prompt_token_ids,
            self.row_params,
            None,
            client_index=member.client_index,
            arrival_time=member.arrival_time,
            lora_request=member.lora_request,
            cache_salt=member.cache_salt,
            priority=member.priority,
            trace_headers=member.trace_headers,
            block_hasher=member._block_hasher,
        )

    def child_row(self, parent: Request, token_id: int) -> Request:
        """Return a row of the parent's tokens and one more, without KV.

        The row is a shallow copy: a new request would hash its whole prompt again.
        """
        row = Request.__new__(Request)
        row.__dict__.update(parent.__dict__)
        row.request_id = self.new_row_id()
        row.status = RequestStatus.PREEMPTED
        row.num_computed_tokens = 0
        row.num_in_flight_tokens = 0
        row.num_stale_output_tokens = 0
        row.num_output_placeholders = 0
        row.drop_stale_output = False
        row.num_preemptions = 0
        row.is_prefill_chunk = False
        row.spec_token_ids = []
        row.events = []
        row.prefill_stats = None
        row._output_token_ids = parent._output_token_ids.copy()
        row._all_token_ids = parent._all_token_ids.copy()
        row.output_token_ids = type(parent.output_token_ids)(row._output_token_ids)
        row.all_token_ids = type(parent.all_token_ids)(row._all_token_ids)
        row.block_hashes = parent.block_hashes.copy()
        row.append_output_token_ids(token_id)
        return row

    def give_tokens(self, row: Request, parent: Request, token_id: int) -> None:
        """Replace a row's generated tokens by the parent's and one more.

        The hashes of its full blocks stay: they are those of the prompt.
        """
        first = self.prompt.size
        row._all_token_ids[first:] = parent._all_token_ids[first:]
        row._output_token_ids[:] = row._all_token_ids[row.num_prompt_tokens :]
        row.append_output_token_ids(token_id)

    def new_row_id(self) -> str:
        """Return an id that no row has had."""
        self._num_rows_made += 1
        return f"{self.group_id}~{self._num_rows_made}"

    def all_tokens(self, row: Request) -> np.ndarray:
        """Return int32[num_tokens], the prompt and the generated tokens of a row."""
        generated = row._all_token_ids[self.prompt.size :]
        return np.concatenate([self.prompt, np.asarray(generated, dtype=np.int32)])

    def take_candidates(
        self, arrived: Collection[str], row_ids: Sequence[str], candidates: StepCandidates | None
    ) -> None:
        """Take the candidates of the rows whose outputs have arrived.

        Args:
            arrived: Ids of these rows.
            row_ids: Ids of the rows of the worker's step, some of which may be gone.
            candidates: By row of the step; None if the worker failed.
        """
        if candidates is not None:
            place_of = self._places(arrived)
            places = np.array([place_of.get(row_id, -1) for row_id in row_ids])
            candidates = at_rows(places, candidates)
        self.candidates.append(candidates)

    def take_sampled(self, arrived: Collection[str], output: ModelRunnerOutput) -> None:
        """Take the candidates of rows that vLLM's sampler has found.

        Args:
            arrived: Ids of the rows whose outputs have arrived.
            output: That of the step.
        """
        assert output.logprobs is not None
        assert self.num_candidates is not None
        place_of = self._places(arrived)
        indices = [output.req_id_to_index[row_id] for row_id in place_of]
        if (starts := output.logprobs.cu_num_generated_tokens) is not None:
            indices = [starts[index] for index in indices]
        candidates = of_sampler(output.logprobs, indices, self.num_candidates)
        self.candidates.append(at_rows(np.array([*place_of.values()]), candidates))

    def _places(self, row_ids: Collection[str]) -> dict[str, int]:
        """Return id to place of some of the rows, in order."""
        chosen = set(row_ids)
        return {row.request_id: i for i, row in enumerate(self.rows) if row.request_id in chosen}

    def advance(self) -> Children:
        """Take a step of the search with the candidates of all rows; return its next rows.

        Keeps the candidates that members want as log-probabilities.

        Raises:
            RuntimeError: The worker had no candidates, as it could not map the catalogue.
        """
        parts = [part for part in self.candidates if part is not None]
        if not parts or len(parts) < len(self.candidates):
            raise RuntimeError("no row has a candidate; the worker's log says why")
        candidates = merged(parts)
        if isinstance(candidates, Continuations):
            assert self.items is not None
            return self.items.advance(candidates)
        if self.num_logprobs:  # of every row as many
            shape = len(self.rows), -1
            kept = slice(0, self.num_logprobs)
            self._history.append(
                (
                    candidates.token_ids.reshape(shape)[:, kept].copy(),
                    candidates.logprobs.reshape(shape)[:, kept].copy(),
                )
            )
        children = self.search.advance(candidates)
        if self.rules is not None:
            self.rules.advance(self.search.generated.tolist())
        return children

    def hypotheses(self) -> list[Hypothesis]:
        """Return the best hypotheses of a search that is done, best first."""
        return self.search.hypotheses() if self.items is None else self.items.hypotheses()

    def worker_step(self, scheduled: Collection[str]) -> ItemStep | SelectionStep | None:
        """Return what the worker needs for those of the rows that are scheduled; None if nothing.

        Args:
            scheduled: Ids of the requests of the step.
        """
        if not self.worker_selects:
            return None
        places = [i for i, row in enumerate(self.rows) if row.request_id in scheduled]
        row_ids = [self.rows[i].request_id for i in places]
        if self.items is not None:
            return self.items.step(row_ids, self.prompt.size, places)
        if not places:
            return None
        rules = None if self.rules is None else self.rules.of(places)
        if self.num_candidates is not None:
            return SelectionStep(row_ids, self.prompt.size, None, self.num_candidates, rules)
        totals, count = self.search.totals[places], self.search.settings.num_candidates
        return SelectionStep(row_ids, self.prompt.size, totals, count, rules)

    def output(self, member: Request, hypothesis: Hypothesis) -> EngineCoreOutput:
        """Return the whole output of a member. Takes the member's events."""
        by_token = hypothesis.reason == "stop" and not isinstance(hypothesis.stop, str)
        params = member.sampling_params
        assert params is not None
        result: dict[str, Any] = {
            "score": hypothesis.score,
            "cumulative_logprob": sum(hypothesis.logprobs),
            "steps": self.search.steps,
        }
        stop = hypothesis.stop if by_token and hypothesis.stop != params.eos_token_id else None
        if self.items is not None and len(hypothesis.places):
            (stop,) = self.items.item_ids([hypothesis])
            result["item"] = stop
        if self.report is not None:  # with one of the results
            result[REPORT] = {**self.report, "steps": self.search.steps}
            if self.items is not None:
                result[REPORT] |= {"item_steps": self.search.steps, **self.items.counts}
            self.report = None
        if self.search.trace is not None:
            result["trace"] = self.search.trace.to_dict()
        output = EngineCoreOutput(
            request_id=member.request_id,
            new_token_ids=hypothesis.token_ids,
            new_logprobs=self._logprobs_of(hypothesis),
            # The front end finds a stop string itself, as for ordinary requests: it cuts the text
            # and reports the string as the stop reason.
            finish_reason=FinishReason.STOP if by_token else FinishReason.LENGTH,
            stop_reason=stop,
            events=member.take_events(),
            prefill_stats=self.prefill_stats,
            trace_headers=member.trace_headers,
        )
        setattr(output, RESULT_FIELD, {SPEC_KEY: result})
        return output

    def _logprobs_of(self, hypothesis: Hypothesis) -> LogprobsLists | None:
        """Return the log-probabilities that the user asked for, None if none.

        Each token has 1 + ``num_logprobs`` columns: itself, then the best of its step.
        """
        if self.num_logprobs is None:
            return None
        count = len(hypothesis.token_ids)
        token_ids = np.empty((count, 1 + self.num_logprobs), dtype=np.int32)
        values = np.empty((count, 1 + self.num_logprobs), dtype=np.float32)
        token_ids[:, 0] = hypothesis.token_ids
        values[:, 0] = hypothesis.logprobs
        ranks = hypothesis.places[:, 2] + 1
        if self.num_logprobs:
            for index, (step, row, _) in enumerate(hypothesis.places):
                step_token_ids, step_values = self._history[step]
                token_ids[index, 1:] = step_token_ids[row]
                values[index, 1:] = step_values[row]
        return LogprobsLists(token_ids, values, ranks, None)


def error_output(member: Request) -> EngineCoreOutput:
    """Return the output of a member whose request failed. Takes the member's events."""
    return EngineCoreOutput(
        request_id=member.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        events=member.take_events(),
        trace_headers=member.trace_headers,
    )
