"""Searches of tokens in the scheduler: with all tokens as candidates, or those that rules allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams

from vllm_trie.searches import (
    BeamSearch,
    Candidates,
    Children,
    Hypothesis,
    SearchSettings,
)
from vllm_trie.searches.engine.constraint import GroupSearch
from vllm_trie.searches.engine.scheduler.group_rules import GroupRules
from vllm_trie.searches.engine.search_wire import TokenSelection
from vllm_trie.searches.search import StopStringFinder

_MOST_STOPS_ON_DEVICE = 8
"""Stop tokens of a search that the device takes further by itself: each is two launches a step."""


class TokenSearch(GroupSearch):
    """A search of tokens.

    Args:
        settings: Of the search.
        params: Of its request.
        prompt: Tokens.
        vocab_size: Of the model.
        find_stop_string: As in :class:`~vllm_trie.searches.BeamSearch`.
        rules: Of the request, None if it has none.
    """

    def __init__(
        self,
        settings: SearchSettings,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        find_stop_string: StopStringFinder | None,
        rules: GroupRules | None,
    ) -> None:
        self.search = search = BeamSearch(settings, prompt, find_stop_string)
        self._rules, self._eos_token_id = rules, params.eos_token_id
        self._vocab_size, self._num_logprobs = vocab_size, params.logprobs or 0
        # The ranks of log-probabilities are places among the best of a beam.
        draws_of_all = params.logprobs is None and search.draws(0) is not None
        self._takes_best_of_all = not params.logprobs and (search.takes_best_of_all or draws_of_all)
        takes_best = self._takes_best_of_all and not settings.do_sample
        has_few_stops = len(settings.stop_token_ids) <= _MOST_STOPS_ON_DEVICE
        self.is_plain = (
            takes_best and rules is None and not search.finds_stop_strings and has_few_stops
        )

    def selection(self, proxy_id: str, rows: np.ndarray) -> TokenSelection:
        rules = None if self._rules is None else self._rules.of(rows)
        search = self.search
        if not self._takes_best_of_all:
            count = search.num_raw_candidates(self._vocab_size)
            count = max(count, min(self._num_logprobs, self._vocab_size))
            return TokenSelection(proxy_id, None, count, rules)
        count, draws = search.settings.num_candidates, search.draws(int(rows[0]))
        return TokenSelection(proxy_id, search.totals[rows], count, rules, draws)

    def advance(self, candidates: Candidates) -> Children:
        children = self.search.advance(candidates)
        if self._rules is not None:
            self._rules.advance(self.search.generated.tolist())
        return children

    def described(self, hypothesis: Hypothesis) -> tuple[int | str | None, dict[str, Any]]:
        # The front end finds a stop string itself, as for ordinary requests: it cuts the text and
        # reports the string as the stop reason.
        is_token = hypothesis.reason == "stop" and not isinstance(hypothesis.stop, str)
        reports = is_token and hypothesis.stop != self._eos_token_id
        return hypothesis.stop if reports else None, {}
