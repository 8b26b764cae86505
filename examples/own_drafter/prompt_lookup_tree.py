"""Prompt lookup as a tree: drafts what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from vllm_trie.drafters import Drafter, DrafterOptions, DraftRequest
from vllm_trie.tree import TokenTree, depth_first_layout


class Options(DrafterOptions):
    match_tokens: int = Field(default=2, ge=1, description="Tokens that must match.")
    continuations: int = Field(default=4, ge=1, description="Branches, the latest first.")


class PromptLookupDrafter(Drafter):
    name = "prompt_lookup_tree"
    Options = Options

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> TokenTree:
        tokens, size = request.token_ids, self.options.match_tokens
        if len(tokens) <= size:
            return TokenTree.empty()
        # Ends of all earlier occurrences of the last `size` tokens.
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        ends = np.flatnonzero((windows == tokens[-size:]).all(axis=1)) + size
        branches = 1 if request.chain_only else self.options.continuations
        paths = [tokens[end : end + request.max_depth] for end in ends[::-1][:branches]]
        # Each path gets an equal share of the budget; `from_paths` merges common prefixes.
        share = -(-request.max_nodes // max(1, len(paths)))
        tree = TokenTree.from_paths([path[:share] for path in paths], request.max_nodes)
        return depth_first_layout(tree)  # contiguous likely paths need fewer KV moves
