"""The method `ngram_trie`: drafts from n-grams of the request's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel

from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest
from vllm_trie.drafters.ngram_trie.frequency import FrequencyTrie
from vllm_trie.drafters.ngram_trie.options import NgramTrieOptions
from vllm_trie.tree import TokenTree, depth_first_layout


@dataclass(slots=True)
class _RequestState:
    trie: FrequencyTrie
    num_prompt_tokens: int
    last_token: int
    """The last token taken in, to notice a request that came back with other tokens."""


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
        state = self._states.get(request.request_id)
        if state is None or not _extends(request, state):
            state = _RequestState(
                FrequencyTrie(self.options.ngram_size), request.num_prompt_tokens, -1
            )
            self._states[request.request_id] = state
        if num_indexed > state.trie.num_tokens:
            state.trie.append(request.token_ids[state.trie.num_tokens : num_indexed].tolist())
            state.last_token = int(request.token_ids[num_indexed - 1])
        return state


def _extends(request: DraftRequest, state: _RequestState) -> bool:
    """Whether the request's tokens still begin with those that were indexed (checked at the end
    of these: a request only ever changes by losing its tail or being replaced)."""
    known = state.trie.num_tokens
    return (
        request.num_prompt_tokens == state.num_prompt_tokens
        and len(request.token_ids) >= known
        and (known == 0 or int(request.token_ids[known - 1]) == state.last_token)
    )
