"""The method `ngram_trie`: drafts from n-grams of the request's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest
from vllm_trie.drafters.ngram_trie.frequency import FrequencyTrie
from vllm_trie.drafters.ngram_trie.options import NgramTrieOptions
from vllm_trie.tree import TokenTree, depth_first_layout


@dataclass(slots=True)
class _RequestState:
    trie: FrequencyTrie
    indexed: np.ndarray
    """int32, the tokens taken in, to notice a request that came back with other tokens."""


class NgramTrieDrafter(Drafter):
    """Drafts the likeliest continuations of the text's last tokens, as its earlier text has them.

    State: one index a request, built from the prompt at the first call and extended by the tokens
    accepted since at each later one.
    """

    name: ClassVar[str] = "ngram_trie"
    Options: ClassVar[type[BaseModel]] = NgramTrieOptions

    def __init__(self, options: NgramTrieOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._states: dict[str, _RequestState] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._propose_one(request) for request in requests]

    def release(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        state = self._updated_state(request)
        tree = state.trie.draft(
            request.token_ids[-self.options.max_prefix_len :].tolist(),
            request.max_nodes,
            request.max_depth,
            request.chain_only,
        )
        return depth_first_layout(tree)

    def _updated_state(self, request: DraftRequest) -> _RequestState:
        num_indexed = (
            len(request.token_ids) if self.options.index_output else request.num_prompt_tokens
        )
        tokens = request.token_ids[:num_indexed]
        state = self._states.get(request.request_id)
        if state is None or not np.array_equal(tokens[: len(state.indexed)], state.indexed):
            state = _RequestState(FrequencyTrie(self.options.ngram_size), tokens[:0])
            self._states[request.request_id] = state
        state.trie.append(tokens[len(state.indexed) :].tolist())
        state.indexed = tokens.copy()
        return state
