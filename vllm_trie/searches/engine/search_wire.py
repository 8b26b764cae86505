"""What passes between the front end, the scheduler and the workers about searches.

The workers keep no state of beams: their tokens and block tables come with every step. Plain
searches under asynchronous scheduling are the exception: the device chooses the children, and the
next step begins before the scheduler hears of them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from vllm.sampling_params import SamplingParams

from vllm_trie.hooks.wire import SEARCH_KEY, extra_args_of
from vllm_trie.searches import BeamOptions, Candidates, Draws, SearchSettings
from vllm_trie.searches.blocks import TokenRules
from vllm_trie.searches.device_beams import launch_children
from vllm_trie.searches.device_step import launch_best
from vllm_trie.searches.engine.constraint import SearchConstraint, WorkerParts, constraints
from vllm_trie.searches.top_k import best_of_rows, launch_draws, select_best
from vllm_trie.searches.unfetched import Unfetched

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# -- front end and scheduler -----------------------------------------------------------------------


class BeamSpec(NamedTuple):
    """Description of a search that the engine needs in addition to ``SamplingParams``.

    Attributes:
        n: Hypotheses to return. vLLM sees a request with one output.
        options: Options of the search.
        constraint: What its candidates are in place of tokens, None for tokens.
    """

    n: int
    options: BeamOptions
    constraint: SearchConstraint | None = None

    def packed(self) -> list[Any]:
        """Return the description as it travels: texts are copied and read at no cost."""
        result = [self.n, _text(self.options)]
        if self.constraint is not None:
            leader = next(iter(type(self.constraint).model_fields))
            result += [leader, _text(self.constraint)]
        return result


def _text(options: BaseModel) -> str:
    return options.model_dump_json(exclude_defaults=True)


def beam_spec(params: SamplingParams) -> BeamSpec:
    """Return the description of a search, which the front end has checked."""
    return _unpacked(*extra_args_of(params)[SEARCH_KEY])


@functools.lru_cache(maxsize=16)  # asked for several times, and may have thousands of ids
def _unpacked(n: int, options: str, leader: str = "", text: str = "") -> BeamSpec:
    constraint = constraints()[leader].model_validate_json(text) if leader else None
    return BeamSpec(n, BeamOptions.model_validate_json(options), constraint)


def search_settings(params: SamplingParams, spec: BeamSpec, max_new_tokens: int) -> SearchSettings:
    """Return the settings of the search that a request's parameters ask for."""
    stop_token_ids = [params.eos_token_id, *(params.stop_token_ids or ())]
    if spec.constraint is not None:
        stop_token_ids = spec.constraint.stop_token_ids(params)
    do_sample = spec.options.do_sample
    return SearchSettings(
        **spec.options.model_dump(exclude={"beam_trace", "detokenize"}),
        trace=spec.options.beam_trace,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(dict.fromkeys(t for t in stop_token_ids if t is not None)),
        temperature=params.temperature if do_sample else 1.0,
        top_k=max(params.top_k, 0) if do_sample else 0,
        top_p=params.top_p if do_sample else 1.0,
        # NumPy's generators take no negative seeds.
        seed=None if params.seed is None or not do_sample else params.seed % 2**64,
        min_tokens=params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        bad_words=tuple(tuple(word) for word in params.bad_words_token_ids or ()),
        logit_bias=tuple((params.logit_bias or {}).items()),
    )


class SearchAnswer(NamedTuple):
    """Result of a search; the tokens of its hypotheses are one behind another in its output.

    Attributes:
        hypotheses: Best first.
        logprobs: Bytes of int32 [tokens, 1 + k] token ids, float32 [tokens, 1 + k] and int64
            [tokens] ranks of all hypotheses, None if the request has no ``logprobs``.
        shared: What all of them have in ``CompletionOutput.beam``.
        report: Labels and amounts of the plugin's counters, None without statistics.
    """

    hypotheses: list[HypothesisAnswer]
    logprobs: tuple[bytes, bytes, bytes] | None
    shared: dict[str, Any]
    report: dict[str, Any] | None


class HypothesisAnswer(NamedTuple):
    """One hypothesis of a :class:`SearchAnswer`.

    Attributes:
        num_tokens: Its length.
        finish_reason: vLLM's ``FinishReason``.
        stop_reason: As in ``CompletionOutput``.
        beam: Its own part of ``CompletionOutput.beam``, also attributes of the output.
    """

    num_tokens: int
    finish_reason: int
    stop_reason: int | str | None
    beam: dict[str, Any]


# -- scheduler and workers -------------------------------------------------------------------------

BEAM_STEPS = "vllm_trie_beams"
"""Attribute of a ``SchedulerOutput``: a list of :class:`BeamStep`. Missing if there are none."""

CANDIDATES = "vllm_trie_candidates"
"""Attribute of a ``ModelRunnerOutput``: the candidates of selections by the ids of their proxies,
without those of selections that failed."""

SELECTIONS = "vllm_trie_selections"
"""Attribute of a ``SchedulerOutput``: a list of :class:`~.constraint.Selection`. Missing if there
are none."""


def block_pairs(copies: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return int64 [n, 2], source and target of copies of blocks, which come as tuples."""
    return np.fromiter(chain.from_iterable(copies), np.int64, 2 * len(copies)).reshape(-1, 2)


class TokenSelection(NamedTuple):
    """Candidates of a group that are tokens.

    Attributes:
        proxy_id: The request that stands for the group.
        totals: float32 [beams], their cumulative log-probabilities. None to select among the
            continuations of each beam, not of all beams together.
        num_candidates: Continuations to select.
        rules: They come before the selection; None if there are none.
        draws: How to draw, None to take the best.
        stop_token_ids: The device chooses the children, none of which ends with these tokens, so
            that it can begin the next step. None if the scheduler chooses. Without `totals` the
            step is one that the device has begun.
    """

    proxy_id: str
    totals: np.ndarray | None
    num_candidates: int
    rules: TokenRules | None = None
    draws: Draws | None = None
    stop_token_ids: tuple[int, ...] | None = None

    def kind(self, num_beams: int) -> Hashable:
        """Return what searches have in common whose selections are launched together."""
        is_alone = self.totals is None and self.stop_token_ids is None
        if is_alone or self.rules is not None or self.draws is not None:
            return self.proxy_id
        return num_beams, self.num_candidates, self.stop_token_ids

    @staticmethod
    def launch(
        selections: Sequence[TokenSelection], logits: torch.Tensor, worker: WorkerParts
    ) -> Unfetched[list[Candidates]]:
        """Start selections of one kind from float [searches * beams, vocab]."""
        _, first, count, rules, draws, stop_token_ids = selections[0]
        if stop_token_ids is not None:
            of_searches = [(selection.proxy_id, selection.totals) for selection in selections]
            return launch_children(worker.beams, of_searches, logits, count, stop_token_ids)
        if first is None:
            return best_of_rows(logits, count, rules).then(lambda candidates: [candidates])
        if draws is not None:
            drawn = launch_draws(logits, first, count, rules, draws)
            return drawn.then(lambda candidates: [candidates])
        totals = [part for selection in selections if (part := selection.totals) is not None]
        if not worker.waits:
            return launch_best(logits, totals, count, rules)
        parts = zip(logits.cpu().split(len(first)), totals, strict=True)
        selected = [select_best(*part, count, rules) for part in parts]
        return Unfetched((), lambda: selected)


class BeamStep(NamedTuple):
    """One token of each beam of a group, in a step.

    Attributes:
        proxy_id: The request that stands for the group.
        prompt_len: Tokens that all beams share.
        num_computed: Tokens of each beam whose KV is computed: the position of its token.
        token_ids: int32 [beams]; None for the children that the device has chosen.
        shared: By KV cache group int32 [blocks], the full blocks of the prompt.
        suffix: By KV cache group int32 [beams, blocks], those behind them; of children that the
            device has chosen their fresh tail blocks, [beams, 0] or [beams, 1].
        lora_request: Of the group.
    """

    proxy_id: str
    prompt_len: int
    num_computed: int
    token_ids: np.ndarray | None
    shared: tuple[np.ndarray, ...]
    suffix: tuple[np.ndarray, ...]
    lora_request: LoRARequest | None

    @property
    def num_beams(self) -> int:
        """The number of beams."""
        return len(self.suffix[0])
