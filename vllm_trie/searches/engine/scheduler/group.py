"""One beam request inside the scheduler: its search, and its answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus

from vllm_trie.hooks.wire import SEARCH_KEY, internal_params
from vllm_trie.searches import Children, Hypothesis
from vllm_trie.searches.engine.beam_support import min_blocks
from vllm_trie.searches.engine.constraint import (
    GroupSearch,
    Selection,
    StepCandidates,
)
from vllm_trie.searches.engine.scheduler.beams import EngineParts, GroupBeams
from vllm_trie.searches.engine.scheduler.group_rules import GroupRules
from vllm_trie.searches.engine.search_wire import (
    HypothesisAnswer,
    SearchAnswer,
    TokenSelection,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

MISSING = Hypothesis([], [], float("-inf"), 0.0, "length", None, np.zeros((0, 3), dtype=np.int64))
"""Takes the place of hypotheses that the search did not find."""


class BeamGroup:
    """State of one beam request, from its arrival to its answer.

    Attributes:
        search: The search.
        beams: What it computes next.
        started: Whether the group has its slots.
        min_blocks: KV blocks that the group must have.
        arrival, arrival_step: When it came, by ``time.monotonic`` and by the scheduler's steps.
    """

    def __init__(
        self,
        request: Request,
        num_answers: int,
        group_search: GroupSearch,
        engine: EngineParts,
        arrival_step: int,
        rules: GroupRules | None = None,
    ) -> None:
        params = request.sampling_params
        assert params is not None
        self.request, self._num_answers = request, num_answers
        self._group_search, self.search = group_search, group_search.search
        self.rules = rules
        self.num_logprobs = params.logprobs
        width, max_new_tokens = self.search.settings.beam_width, self.search.settings.max_new_tokens
        self.beam_width, num_tokens = width, request.num_prompt_tokens
        self.min_blocks = 0
        self._null_blocks: list[tuple[int, int]] = []  # by KV cache group, with the block size
        for manager in engine.managers:
            size = manager.block_size
            num_null = manager.get_num_skipped_tokens(num_tokens) // size  # before a window
            least = min_blocks(num_tokens, width, max_new_tokens, size)
            self.min_blocks += least - num_null
            self._null_blocks.append((num_null, size))

        self.arrival, self.arrival_step = time.monotonic(), arrival_step
        self.started = False
        engine = engine._replace(on_device=engine.on_device and group_search.is_plain)
        params = internal_params(
            max_new_tokens, skip_reading_prefix_cache=params.skip_reading_prefix_cache
        )
        self.beams = GroupBeams(request, params, self.search, engine)
        self._report: dict[str, object] | None = None
        # Those of the present step of the search, by pass; None if the worker failed.
        self._candidates: list[StepCandidates | None] = []
        self._prefill_stats: PrefillStats | None = None
        self._history: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def runs(self) -> bool:
        """Whether the group has KV, or gets some in the step that is scheduled."""
        return self.beams.proxy.status == RequestStatus.RUNNING

    @property
    def blocks_to_go_on(self) -> int:
        """The KV blocks that it had lost, and those that its next tokens may take."""
        return self.beams.num_lost + self.beam_width * len(self._null_blocks)

    def blocks_with(self, num_new_tokens: int) -> int:
        """Return the KV blocks that hypotheses of `num_new_tokens` are expected to take."""
        # The trie is little larger than its longest path: hypotheses meet a few tokens back.
        num_tokens = self.request.num_prompt_tokens + num_new_tokens
        return sum(
            cdiv(num_tokens, size) + 2 * self.beam_width - num_null
            for num_null, size in self._null_blocks
        )

    def start(self, report: dict[str, object] | None) -> None:
        """Start; the answer takes a report of the search along, if there is to be one."""
        self.started, self._report = True, report

    def restart(self) -> None:
        """Begin anew with a new proxy: the KV of all beams is lost."""
        self._candidates = []
        self.beams.restart()

    def end_prompt(self, manager: KVCacheManager) -> None:
        """Go on behind the prompt, whose KV is computed."""
        self._prefill_stats = self.beams.proxy.take_prefill_stats()
        if self._prefill_stats is not None:
            self._prefill_stats.finalize(manager.estimate_cached_tokens(self.beams.proxy))
        self.beams.take_prompt(manager)

    def take_candidates(self, candidates: StepCandidates | None) -> None:
        """Keep the candidates that the worker has selected in a pass."""
        self._candidates.append(candidates)

    def advance(self) -> Children:
        """Take a step of the search with the candidates of all beams; return its next beams.

        Keeps the candidates that the answer has as log-probabilities.

        Raises:
            RuntimeError: The worker had no candidates.
        """
        parts = [part for part in self._candidates if part is not None]
        if not parts or len(parts) < len(self._candidates):
            raise RuntimeError("no beam has a candidate; the worker's log says why")
        self._candidates = []
        candidates = _merged(parts)
        if self.num_logprobs:  # of every beam as many
            shape = self.search.num_rows, -1
            kept = slice(0, self.num_logprobs)
            self._history.append(
                (
                    candidates.token_ids.reshape(shape)[:, kept].copy(),
                    candidates.logprobs.reshape(shape)[:, kept].copy(),
                )
            )
        return self._group_search.advance(candidates)

    def selection(self, output: SchedulerOutput, sent: Collection[str]) -> Selection | None:
        """Return what the worker needs to select the candidates of a step; None if nothing.

        Args:
            output: The step.
            sent: Proxies whose beams it has.
        """
        beams, level, proxy_id = self.beams, self.beams.level, self.beams.proxy.request_id
        if not beams.decodes:
            is_last = not beams.proxy.is_prefill_chunk and not self.search.steps
            is_scheduled = is_last and proxy_id in output.num_scheduled_tokens
            first = np.zeros(1, dtype=np.int64)
            return self._group_search.selection(proxy_id, first) if is_scheduled else None
        if level is None or not level.selects or proxy_id not in sent:
            return None
        selection = self._group_search.selection(proxy_id, beams.rows)
        if beams.device_chooses:
            assert isinstance(selection, TokenSelection)
            totals = selection.totals if beams.ahead is None else None
            stop_token_ids = self.search.settings.stop_token_ids
            selection = selection._replace(stop_token_ids=stop_token_ids, totals=totals)
        return selection

    def first_output(self) -> EngineCoreOutput:
        """Return an output without tokens, by which vLLM counts the prompt as computed. Takes the
        request's events."""
        return EngineCoreOutput(
            request_id=self.request.request_id,
            new_token_ids=[],
            events=self.request.take_events(),
            prefill_stats=self._prefill_stats,
        )

    def output(self) -> EngineCoreOutput:
        """Return the whole answer of a search that is done. Takes the request's events."""
        hypotheses = self._group_search.hypotheses()[: self._num_answers]
        hypotheses += [MISSING] * (self._num_answers - len(hypotheses))
        shared: dict[str, object] = {"steps": self.search.steps}
        report = self._report
        if report is not None:
            report |= shared
        answers = [self._answer(hypothesis) for hypothesis in hypotheses]
        if self.search.trace is not None:
            answers[0].beam["trace"] = self.search.trace._asdict()
        answer = SearchAnswer(answers, self._logprobs_of(hypotheses), shared, report)
        return EngineCoreOutput(
            request_id=self.request.request_id,
            new_token_ids=[token for hypothesis in hypotheses for token in hypothesis.token_ids],
            finish_reason=FinishReason(answers[0].finish_reason),
            events=self.request.take_events(),
            prefill_stats=self._prefill_stats,
            trace_headers=self.request.trace_headers,
            kv_transfer_params={SEARCH_KEY: answer},
        )

    def _answer(self, hypothesis: Hypothesis) -> HypothesisAnswer:
        stop, described = self._group_search.described(hypothesis)
        beam = {
            "score": hypothesis.score,
            "cumulative_logprob": sum(hypothesis.logprobs),
            **described,
        }
        by_token = hypothesis.reason == "stop" and not isinstance(hypothesis.stop, str)
        reason = FinishReason.STOP if by_token else FinishReason.LENGTH
        return HypothesisAnswer(len(hypothesis.token_ids), reason, stop, beam)

    def _logprobs_of(self, hypotheses: Sequence[Hypothesis]) -> tuple[bytes, bytes, bytes] | None:
        """Return the log-probabilities that the user asked for, None if none.

        Each token has 1 + ``num_logprobs`` columns: itself, then the best of its step.
        """
        if self.num_logprobs is None:
            return None
        places = np.concatenate([hypothesis.places for hypothesis in hypotheses])
        token_ids = np.empty((len(places), 1 + self.num_logprobs), dtype=np.int32)
        values = np.empty((len(places), 1 + self.num_logprobs), dtype=np.float32)
        token_ids[:, 0] = np.concatenate([hypothesis.token_ids for hypothesis in hypotheses])
        values[:, 0] = np.concatenate([hypothesis.logprobs for hypothesis in hypotheses])
        for step, (step_token_ids, step_values) in enumerate(self._history):
            at = places[:, 0] == step
            token_ids[at, 1:] = step_token_ids[places[at, 1]]
            values[at, 1:] = step_values[places[at, 1]]
        ranks = (places[:, 2] + 1).astype(np.int64)
        return token_ids.tobytes(), values.tobytes(), ranks.tobytes()


def error_output(request: Request) -> EngineCoreOutput:
    """Return the output of a request that failed. Takes its events."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ERROR,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )


def _merged(parts: Sequence[StepCandidates]) -> StepCandidates:
    """Return the candidates that were selected in several passes, by row of the search."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return type(parts[0])(*(c[0] if c[0] is None else np.concatenate(c) for c in columns))
