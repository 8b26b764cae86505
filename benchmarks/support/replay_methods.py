"""The drafting methods that replay.py compares: this project's and its peers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from support.paper_drafter import PaperDrafter
from vllm_trie.drafts import DrafterContext, DraftRequest, get_drafter_class, parse_options
from vllm_trie.tree import TokenTree


class Method(Protocol):
    """Drafts for one request at a time."""

    def draft(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> TokenTree:
        """Draft after `tokens` (int32, prompt and accepted output)."""
        ...

    def finish(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        """Take note that the request ended with these tokens."""
        ...


class Setting(NamedTuple):
    """Settings of a replay."""

    num_nodes: int
    vocab_size: int
    tokenizer: str = ""
    """File, folder or name of the recorded model's tokenizer, to which a corpus is bound."""
    corpus: str | None = None


class OwnDrafter:
    """A drafter of this package, called as the engine calls it."""

    def __init__(
        self, name: str, setting: Setting, chain_only: bool = False, **options: Any
    ) -> None:
        context = DrafterContext(
            setting.vocab_size,
            max_model_len=1 << 20,
            max_num_seqs=1,
            num_nodes=setting.num_nodes,
            tokenizer=setting.tokenizer,
        )
        if setting.corpus is not None and name == "ngram_trie":
            options["corpus"] = setting.corpus
        self.drafter = get_drafter_class(name)(parse_options(name, options), context)
        self._num_nodes = setting.num_nodes
        self._chain_only = chain_only

    def draft(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> TokenTree:
        [tree] = self.drafter.propose([self._request(request_id, tokens, num_prompt_tokens)])
        return tree

    def finish(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        request = self._request(request_id, tokens, num_prompt_tokens)
        self.drafter.released(request, tokens[num_prompt_tokens:])

    def _request(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> DraftRequest:
        return DraftRequest(
            request_id, tokens, num_prompt_tokens, self._num_nodes, 1 << 20, self._chain_only
        )


class PromptLookup:
    """Prompt lookup as in vLLM's `ngram`.

    Finds the longest n-gram at the end of the text that occurred before, of `min_length` to 5
    tokens, and continues its first occurrence. The lengths are vLLM's `prompt_lookup_min` and
    `prompt_lookup_max`, both 5 by default.
    """

    def __init__(self, num_nodes: int, min_length: int = 5) -> None:
        self._num_nodes = num_nodes
        self._lengths = range(5, min_length - 1, -1)

    def draft(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> TokenTree:
        for length in self._lengths:
            if len(tokens) <= length:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            starts = np.flatnonzero((windows == tokens[-length:]).all(axis=1))
            if len(starts):
                start = int(starts[0]) + length
                chain = tokens[start : start + self._num_nodes]
                return TokenTree.from_paths([chain.tolist()], self._num_nodes)
        return TokenTree.empty()

    def finish(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        pass


class SuffixDecoding:
    """Arctic Inference's suffix decoding, called as vLLM's `suffix` method calls it.

    Prompt and output of the request form a local tree, the outputs of all requests a global one.
    The defaults are vLLM's. `tree` turns the tree mode on and lifts the limits on the tree's size.
    """

    def __init__(self, num_nodes: int, tree: bool = False) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=24, max_cached_requests=10_000)
        self._known: dict[str, int] = {}
        self._limits: dict[str, Any] = {"max_spec_tokens": num_nodes}
        if tree:
            self._limits |= {
                "use_tree_spec": True,
                "max_spec_offset": float(num_nodes),
                "min_token_prob": 0.0,
            }

    def draft(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> TokenTree:
        if request_id not in self._known:
            self._cache.start_request(request_id, tokens[:num_prompt_tokens])
            self._known[request_id] = num_prompt_tokens
        self._take_in(request_id, tokens)
        draft = self._cache.speculate(request_id, tokens[-24:], **self._limits)
        return TokenTree.from_lists(draft.token_ids, draft.parents)

    def finish(self, request_id: str, tokens: np.ndarray, num_prompt_tokens: int) -> None:
        if request_id in self._known:
            self._take_in(request_id, tokens)
            self._cache.stop_request(request_id)
            del self._known[request_id]

    def _take_in(self, request_id: str, tokens: np.ndarray) -> None:
        self._cache.add_active_response(request_id, tokens[self._known[request_id] :])
        self._known[request_id] = len(tokens)


METHODS: dict[str, Callable[[Setting], Method]] = {
    "ngram_trie": lambda s: OwnDrafter("ngram_trie", s, store_tokens=0),
    "ngram_trie_store": lambda s: OwnDrafter("ngram_trie", s),
    "ngram_trie_chain": lambda s: OwnDrafter("ngram_trie", s, chain_only=True, store_tokens=0),
    "ngram_trie_store_chain": lambda s: OwnDrafter("ngram_trie", s, chain_only=True),
    "paper": lambda s: OwnDrafter(PaperDrafter.name, s),
    "vllm_ngram": lambda s: PromptLookup(s.num_nodes, min_length=1),
    "vllm_ngram_default": lambda s: PromptLookup(s.num_nodes),
    "suffix": lambda s: SuffixDecoding(s.num_nodes),
    "suffix_tree": lambda s: SuffixDecoding(s.num_nodes, tree=True),
}
"""Name -> constructor. Peers draft without a corpus."""
