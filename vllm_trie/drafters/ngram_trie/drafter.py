"""The method `ngram_trie`: drafts from n-grams of earlier text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafters.base import Drafter, DrafterContext, DraftRequest
from vllm_trie.drafters.ngram_trie.frequency import FrequencyTrie
from vllm_trie.drafters.ngram_trie.options import NgramTrieOptions
from vllm_trie.drafters.ngram_trie.recycling import Recycling
from vllm_trie.drafters.ngram_trie.store import RequestStore
from vllm_trie.drafters.request_texts import IndexedText, RequestTexts
from vllm_trie.ngrams import Backend, Blend, Job, Source, choose_backend
from vllm_trie.ngrams.corpus_file import (
    check_vocabulary,
    fingerprint,
    open_corpus,
    read_header,
)
from vllm_trie.ngrams.native import NativeCorpus
from vllm_trie.ngrams.tokenizers import load_corpus_tokenizer
from vllm_trie.store import StoredText
from vllm_trie.tree import TokenTree
from vllm_trie.watched_file import WatchedFile

BLEND = Blend(
    own=Source(concentration=0.5, discount=0.7),
    shared=Source(concentration=4.0, discount=0.8),
    shared_long=Source(concentration=0.05, discount=0.05),
    path_trust=0.3,
    learning_rate=0.3,
    min_left=1e-4,
    cut_left=0.5,
    cut_share=0.25,
)
"""The scoring "blended"; docs/ngram_trie.md has the alternatives that were measured."""


class NgramTrieDrafter(Drafter):
    """Drafts the continuations of a text that earlier text makes likeliest.

    State: an index of each request's own text, built from the prompt at the first call and
    extended at each later one by the tokens accepted since; with scoring "blended", also the
    outputs of finished requests.
    """

    name: ClassVar[str] = "ngram_trie"
    Options: ClassVar[type[BaseModel]] = NgramTrieOptions
    reuses_arrays: ClassVar[bool] = False

    def __init__(self, options: NgramTrieOptions, context: DrafterContext) -> None:
        super().__init__(options, context)
        self._scoring: BlendedScoring | FrequencyScoring
        if options.scoring == "frequency":
            self._scoring = FrequencyScoring(options)
        else:
            self._scoring = BlendedScoring(
                options, choose_backend(BLEND), watch_corpus(options.corpus, context)
            )
            self.needs_node_argmax = options.recycle  # type: ignore[misc]

    @classmethod
    def check_files(
        cls, options: NgramTrieOptions, vocab_size: int, draft_model: str | None
    ) -> None:
        if options.corpus is not None and options.scoring == "blended":
            check_vocabulary(Path(options.corpus), read_header(Path(options.corpus)), vocab_size)

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:
        if isinstance(self._scoring, BlendedScoring):
            self._scoring.read_prompts(requests)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        return self._scoring.propose(requests)

    def propose_after(
        self, requests: Sequence[DraftRequest], added: Sequence[Sequence[int]]
    ) -> list[TokenTree]:
        if isinstance(self._scoring, FrequencyScoring):
            return super().propose_after(requests, added)
        return self._scoring.propose_after(requests, added)

    def release(self, request_id: str) -> None:
        self._scoring.release(request_id)

    def finished_texts(self) -> Sequence[StoredText]:
        return () if self._store is None else self._store.texts()

    def restore_texts(self, texts: Sequence[StoredText]) -> None:
        if self._store is not None:
            self._store.restore(texts)

    def set_prompt_key(self, key: bytes) -> None:
        if self._store is not None:
            self._store.key = key

    def successors(self) -> Sequence[StoredText]:
        return () if self._recycling is None else self._recycling.successors()

    def restore_successors(self, successors: Sequence[StoredText]) -> None:
        if self._recycling is not None:
            self._recycling.restore(successors)

    @property
    def _recycling(self) -> Recycling | None:
        return self._scoring.recycling if isinstance(self._scoring, BlendedScoring) else None

    @property
    def _store(self) -> RequestStore | None:
        return self._scoring.store if isinstance(self._scoring, BlendedScoring) else None


def watch_corpus(path: str | None, context: DrafterContext) -> Callable[[], NativeCorpus | None]:
    """Open the corpus of the option `corpus`; return a function that gives its newest version.

    Tensor-parallel ranks must draft alike and would see a new file at different steps, so they keep
    the first one.

    Raises:
        ValueError: the file cannot be used, or was not built with the model's tokenizer.
        RuntimeError: the compiled core, which alone reads corpora, is not available.
    """
    if path is None:
        return lambda: None
    tokenizer = load_corpus_tokenizer(context.tokenizer or context.model)
    tokenizer_print = fingerprint(tokenizer.vocabulary)

    def open_file(path: Path) -> NativeCorpus:
        return open_corpus(path, context.vocab_size, tokenizer_print)

    if context.tensor_parallel_size > 1:
        corpus = open_file(Path(path))
        return lambda: corpus
    return WatchedFile(Path(path), open_file, "the corpus").latest


@dataclass(slots=True)
class _BlendedState:
    cache_salt: str | None
    output: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """int32, a copy."""
    num_tokens: int = 0
    """Of the text that the last draft continues."""
    prompt: bytes = b""
    """Its fingerprint, with a store."""


class BlendedScoring:
    """Contexts of every length vote, in the request's own text and in finished requests."""

    def __init__(
        self,
        options: NgramTrieOptions,
        backend: Backend,
        newest_corpus: Callable[[], NativeCorpus | None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._newest_corpus = newest_corpus
        self._corpus = newest_corpus()
        self._states: dict[str, _BlendedState] = {}
        self._texts = RequestTexts(
            backend, options.max_context_len, options.index_tokens, options.index_output
        )
        self.store = (
            RequestStore(backend, options.max_context_len, options.store_tokens)
            if options.store_tokens > 0
            else None
        )
        self.recycling = Recycling(backend) if options.recycle else None

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:
        """Index prompts, which the backend does where it drafts: for one node, which is dropped."""
        for request in requests:
            self._update_state(request)
            self._states[request.request_id].num_tokens = 0  # no draft continues it yet
        jobs = []
        for request, text in zip(requests, self._texts.update(requests), strict=True):
            jobs.append(self._job(replace(request, max_nodes=1, max_depth=1), text, 0))
        self._backend.draft_batch(jobs)

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Draft a tree for each request, in one call of the backend."""
        self._corpus = self._newest_corpus()
        if self.recycling is not None:
            known = [self._states.get(request.request_id) for request in requests]
            lengths = [0 if state is None else state.num_tokens for state in known]
            self.recycling.observe(requests, lengths)
        for request in requests:
            self._update_state(request)
        texts = self._texts.update(requests)
        drafts = self._backend.draft_batch(
            [self._job(*each, 0) for each in zip(requests, texts, strict=True)]
        )
        if self.store is not None:
            for request, draft in zip(requests, drafts, strict=True):
                self.store.mark_used(request.cache_salt, draft.used_text)
        return [draft.tree for draft in drafts]

    def propose_after(
        self, requests: Sequence[DraftRequest], added: Sequence[Sequence[int]]
    ) -> list[TokenTree]:
        """Draft after tokens that the indexes do not hold, in one call of the backend."""
        jobs = [
            self._job(request, self._texts.after(request, tokens), len(tokens))
            for request, tokens in zip(requests, added, strict=True)
        ]
        return [draft.tree for draft in self._backend.draft_batch(jobs)]

    def release(self, request_id: str) -> None:
        """Forget a request; its output goes to the store."""
        self._texts.release(request_id)
        state = self._states.pop(request_id, None)
        if state is not None and self.store is not None:
            self.store.add(state.cache_salt, state.output, state.prompt)

    def _update_state(self, request: DraftRequest) -> None:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _BlendedState(request.cache_salt)
            if self.store is not None:
                prompt = request.token_ids[: request.num_prompt_tokens]
                state.prompt = self.store.prompt_print(request.cache_salt, prompt)
        state.num_tokens = len(request.token_ids)
        if self.store is not None:
            num_prompt_tokens = min(request.num_prompt_tokens, state.num_tokens)
            state.output = request.token_ids[num_prompt_tokens:].astype(np.int32)

    def _job(self, request: DraftRequest, text: IndexedText, num_added: int) -> Job:
        """Return the job that drafts after a request's text, or after it and added tokens."""
        prompt = self._states[request.request_id].prompt
        return Job(
            own=text.own,
            store=None if self.store is None else self.store.index(request.cache_salt),
            corpus=self._corpus,
            tokens=text.tokens,
            num_indexed=text.num_indexed,
            max_nodes=request.max_nodes,
            max_depth=request.max_depth - num_added,
            chain_only=request.chain_only,
            min_probability=request.min_probability,
            recycled=None if self.recycling is None else self.recycling.table,
            scope=0 if self.recycling is None else self.recycling.scope(request.cache_salt),
            first=text.first,
            text=text.text,
            answer=-1 if self.store is None else self.store.answer(request.cache_salt, prompt),
            output_begin=request.num_prompt_tokens - text.first,
            num_learned=text.num_learned,
            odds=text.odds,
        )


class FrequencyScoring:
    """The paper's method, as a reference: in plain Python, without a store."""

    def __init__(self, options: NgramTrieOptions) -> None:
        self._options = options
        self._tries: dict[str, FrequencyTrie] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        """Draft a tree for each request."""
        return [self._propose_one(request) for request in requests]

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self._tries.pop(request_id, None)

    def _propose_one(self, request: DraftRequest) -> TokenTree:
        trie = self._tries.get(request.request_id)
        if trie is None:
            trie = self._tries[request.request_id] = FrequencyTrie(self._options.ngram_size)
        tokens = request.token_ids
        trie.synchronize(
            tokens if self._options.index_output else tokens[: request.num_prompt_tokens]
        )
        return trie.draft(
            tokens[-self._options.max_prefix_len :].tolist(),
            request.max_nodes,
            request.max_depth,
            request.chain_only,
        )
