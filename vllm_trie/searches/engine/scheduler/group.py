"""One beam request inside the scheduler: its search, and its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus

from vllm_trie.extras.items.catalogues import Catalogues, GroupItems
from vllm_trie.extras.items.step import Continuations
from vllm_trie.hooks.wire import (
    SPEC_KEY,
    BeamSpec,
    HypothesisAnswer,
    SearchAnswer,
    internal_params,
    search_settings,
)
from vllm_trie.searches import BeamSearch, Children, Hypothesis, num_raw_candidates
from vllm_trie.searches.engine.beam_support import check_inputs, min_blocks
from vllm_trie.searches.engine.scheduler.beams import EngineLimits, GroupBeams
from vllm_trie.searches.engine.scheduler.group_rules import GroupRules
from vllm_trie.searches.engine.search_wire import (
    BEAM_STEPS,
    ItemSelection,
    StepCandidates,
    TokenSelection,
)
from vllm_trie.searches.search import StopStringFinder

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

RESULT_FIELD = "kv_transfer_params"
"""Field of an ``EngineCoreOutput`` in which a search's result travels to the front end."""

MISSING = Hypothesis([], [], float("-inf"), 0.0, "length", None, np.zeros((0, 3), dtype=np.int64))
"""Takes the place of hypotheses that the search did not find."""


class BeamGroup:
    """State of one beam request, from its arrival to its answer.

    Attributes:
        search: The search, of which ``items`` is more inside a catalogue.
        beams: What it computes next.
        started, parked: Whether the group has its slots, and whether it has given its blocks up to
            others.
        min_blocks, expected_blocks: KV blocks that the group must have, and may come to hold.
        arrival, arrival_step: When it came, by ``time.monotonic`` and by the scheduler's steps.
    """

    def __init__(
        self,
        request: Request,
        spec: BeamSpec,
        limits: EngineLimits,
        arrival_step: int,
        find_stop_string: StopStringFinder | None,
        catalogues: Catalogues,
        rules: GroupRules | None = None,
    ) -> None:
        params = request.sampling_params
        assert params is not None
        check_inputs(request)
        prompt = request.prompt_token_ids
        assert prompt is not None
        self.request = request
        self.beam_width = spec.options.beam_width
        self._num_answers = spec.n
        self.prompt = np.asarray(prompt, dtype=np.int32)
        max_new_tokens = min(request.max_tokens, limits.max_model_len - len(prompt))
        self.num_logprobs = params.logprobs
        self.num_candidates: int | None = None  # of each beam; None: of all beams together
        self.rules = rules
        if spec.options.items is None:
            settings = search_settings(params, spec, max_new_tokens)
            self.items: GroupItems | None = None
            self.search = BeamSearch(settings, prompt, find_stop_string)
            # The ranks of log-probabilities are places among the best of a beam.
            draws_of_all = params.logprobs is None and self.search.draws(0) is not None
            if params.logprobs or not (self.search.takes_best_of_all or draws_of_all):
                self.num_candidates = max(
                    num_raw_candidates(settings, prompt, limits.vocab_size),
                    min(params.logprobs or 0, limits.vocab_size),
                )
        else:
            self.items = GroupItems(catalogues, spec, params, max_new_tokens)
            self.search = self.items.search
            max_new_tokens = self.search.settings.max_new_tokens
        block_size = limits.block_size
        self.min_blocks = min_blocks(len(prompt), self.beam_width, max_new_tokens, block_size)
        # The trie is little larger than its longest path: hypotheses meet a few tokens back.
        self.expected_blocks = cdiv(len(prompt) + max_new_tokens, block_size) + 2 * self.beam_width

        self.arrival, self.arrival_step = time.monotonic(), arrival_step
        self.started = self.parked = False
        limits = limits._replace(on_device=limits.on_device and self._is_plain)
        self.beams = GroupBeams(request, internal_params(max_new_tokens), self.search, limits)
        self._report: dict[str, object] | None = None
        # Those of the present step of the search, by pass; None if the worker failed.
        self._candidates: list[StepCandidates | None] = []
        self._prefill_stats: PrefillStats | None = None
        self._history: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def _is_plain(self) -> bool:
        """Whether tokens and their probabilities alone decide what the search does."""
        search = self.search
        is_constrained = self.items is not None or self.rules is not None
        takes_best_of_all = self.num_candidates is None and not search.settings.do_sample
        return takes_best_of_all and not is_constrained and not search.finds_stop_strings

    @property
    def runs(self) -> bool:
        """Whether the group has KV, or gets some in the step that is scheduled."""
        return self.beams.proxy.status == RequestStatus.RUNNING

    def start(self, report: dict[str, object] | None) -> None:
        """Start; the answer takes a report of the search along, if there is to be one."""
        self.started, self._report = True, report

    def park(self, parked: bool) -> None:
        """Give the blocks up to other groups, or go on."""
        self.parked = parked

    def restart(self) -> None:
        """Begin anew with a new proxy: the KV of all beams is lost."""
        self._candidates = []
        self.beams.restart()

    def end_prompt(self, manager: KVCacheManager) -> None:
        """Go on behind the prompt, whose KV is computed."""
        stats = self.beams.proxy.take_prefill_stats()
        if self._prefill_stats is None and stats is not None:
            stats.finalize(manager.estimate_cached_tokens(self.beams.proxy))
            self._prefill_stats = stats
        self.beams.begin(manager)

    def take_candidates(self, candidates: StepCandidates | None) -> None:
        """Keep the candidates that the worker has selected in a pass."""
        self._candidates.append(candidates)

    def advance(self) -> Children:
        """Take a step of the search with the candidates of all beams; return its next beams.

        Keeps the candidates that the answer has as log-probabilities.

        Raises:
            RuntimeError: The worker had no candidates, as it could not map the catalogue.
        """
        parts = [part for part in self._candidates if part is not None]
        if not parts or len(parts) < len(self._candidates):
            raise RuntimeError("no beam has a candidate; the worker's log says why")
        self._candidates = []
        candidates = _merged(parts)
        if isinstance(candidates, Continuations):
            assert self.items is not None
            return self.items.advance(candidates)
        if self.num_logprobs:  # of every beam as many
            shape = self.search.num_rows, -1
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

    def selection(self, output: SchedulerOutput) -> ItemSelection | TokenSelection | None:
        """Return what the worker needs to select the candidates of a step; None if nothing."""
        beams, level, proxy_id = self.beams, self.beams.level, self.beams.proxy.request_id
        if not beams.decodes:
            is_last = not beams.proxy.is_prefill_chunk and not self.search.steps
            is_scheduled = is_last and proxy_id in output.num_scheduled_tokens
            return self._selection(np.zeros(1, dtype=np.int64)) if is_scheduled else None
        steps = getattr(output, BEAM_STEPS, ())
        if level is None or not level.selects or all(step.proxy_id != proxy_id for step in steps):
            return None
        selection = self._selection(beams.rows)
        if beams.device_chooses and isinstance(selection, TokenSelection):
            totals = selection.totals if beams.ahead is None else None
            stop_token_ids = self.search.settings.stop_token_ids
            selection = selection._replace(stop_token_ids=stop_token_ids, totals=totals)
        return selection

    def _selection(self, rows: np.ndarray) -> ItemSelection | TokenSelection:
        """Return what the worker needs to select candidates of int64 [beams] of the search."""
        proxy_id = self.beams.proxy.request_id
        if self.items is not None:
            return self.items.selection(proxy_id, rows)
        rules = None if self.rules is None else self.rules.of(rows)
        if self.num_candidates is not None:
            return TokenSelection(proxy_id, None, self.num_candidates, rules)
        search = self.search
        count, draws = search.settings.num_candidates, search.draws(int(rows[0]))
        return TokenSelection(proxy_id, search.totals[rows], count, rules, draws)

    def output(self) -> EngineCoreOutput:
        """Return the whole answer of a search that is done. Takes the request's events."""
        search = self.search if self.items is None else self.items
        hypotheses = search.hypotheses()[: self._num_answers]
        hypotheses += [MISSING] * (self._num_answers - len(hypotheses))
        shared: dict[str, object] = {"steps": self.search.steps}
        report = self._report
        if report is not None:
            report |= shared
            if self.items is not None:
                report |= {"item_steps": self.search.steps, **self.items.counts}
        if self.search.trace is not None:
            shared["trace"] = asdict(self.search.trace)
        answers = [self._answer(hypothesis) for hypothesis in hypotheses]
        answer = SearchAnswer(answers, self._logprobs_of(hypotheses), shared, report)
        output = EngineCoreOutput(
            request_id=self.request.request_id,
            new_token_ids=[token for hypothesis in hypotheses for token in hypothesis.token_ids],
            finish_reason=FinishReason(answers[0].finish_reason),
            events=self.request.take_events(),
            prefill_stats=self._prefill_stats,
            trace_headers=self.request.trace_headers,
        )
        setattr(output, RESULT_FIELD, {SPEC_KEY: answer})
        return output

    def _answer(self, hypothesis: Hypothesis) -> HypothesisAnswer:
        params = self.request.sampling_params
        assert params is not None
        by_token = hypothesis.reason == "stop" and not isinstance(hypothesis.stop, str)
        stop = hypothesis.stop if by_token and hypothesis.stop != params.eos_token_id else None
        beam: dict[str, object] = {
            "score": hypothesis.score,
            "cumulative_logprob": sum(hypothesis.logprobs),
        }
        if self.items is not None and len(hypothesis.places):
            (stop,) = self.items.item_ids([hypothesis])
            beam["item"] = stop
        # The front end finds a stop string itself, as for ordinary requests: it cuts the text and
        # reports the string as the stop reason.
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
    make: Any = type(parts[0])
    columns = zip(*parts, strict=True)
    merged: StepCandidates = make(*(c[0] if c[0] is None else np.concatenate(c) for c in columns))
    return merged
