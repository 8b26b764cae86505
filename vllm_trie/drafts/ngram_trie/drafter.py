"""The method `ngram_trie`: drafts from n-grams of earlier text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import BaseModel

from vllm_trie.drafts.drafter import (
    Drafter,
    DrafterContext,
    DraftRequest,
    PreparedDrafts,
)
from vllm_trie.drafts.ngram_trie.options import NgramTrieOptions
from vllm_trie.drafts.ngram_trie.recycling import Recycling
from vllm_trie.drafts.ngram_trie.store import RequestStore, prompt_print
from vllm_trie.drafts.ngrams import Blend, Candidates, Job, NativeBackend, Recycled, Source
from vllm_trie.drafts.ngrams.job import Draft
from vllm_trie.drafts.ngrams.native import PackedJobs
from vllm_trie.drafts.request_texts import IndexedText, RequestTexts
from vllm_trie.tree import TokenTree

BLEND = Blend(
    own=Source(concentration=0.3, discount=0.7),
    shared=Source(concentration=4.0, discount=0.8),
    shared_long=Source(concentration=0.05, discount=0.05),
    path_trust=0.3,
    min_left=1e-4,
    cut_left=0.5,
    cut_share=0.25,
)
"""Fitted on recorded answers; benchmarks/drafters.md has the alternatives that were measured."""
SAMPLED = BLEND._replace(
    recycled=Recycled(triple=0.7, pair=0.3, single=0.5, sibling=0.4, guess=0.4), path_trust=0.0
)
"""For requests with a temperature, fitted on samples at 0.6 and 1.0: a text repeats itself less."""

_STORE_STEP_TOKENS = 1_024
"""Tokens of ended requests that a step indexes and removes: 3 to 6 ms."""


class NgramTrieDrafter(Drafter):
    """Drafts the continuations of a text that earlier text makes likeliest.

    Contexts of every length vote, in the request's own text, in finished requests, in an archive.

    State: an index of each request's own text, built from the prompt at the first call and
    extended at each later one by the tokens accepted since; the outputs of finished requests.

    Attributes:
        store: Outputs of finished requests; None without a store.
        recycling: What the model held likely in earlier steps; None without.
    """

    name: ClassVar[str] = "ngram_trie"
    Options: ClassVar[type[BaseModel]] = NgramTrieOptions
    reuses_arrays = False

    def __init__(
        self,
        options: NgramTrieOptions,
        context: DrafterContext,
        backend: NativeBackend | None = None,
    ) -> None:
        super().__init__(options, context)
        self._backend = backend = backend or NativeBackend(BLEND, SAMPLED)
        self._newest_archive = options.open_archive(context)
        self._archive = self._newest_archive()
        # Lengths of prompts and fingerprints, by request id; a session's prompt grows.
        self._prompts: dict[str, tuple[int, bytes]] = {}
        order = options.max_context_len
        self._texts = RequestTexts(backend, order, options.index_tokens, options.index_output)
        self.store = None
        if options.store_tokens:
            self.store = RequestStore(backend, order, options.store_tokens, context.text_stores)
        self.recycling = None
        if options.recycle:
            self.recycling = Recycling(options.recycle_contexts, context.max_num_seqs)
        self.needs_rows = self.recycling is not None

    @classmethod
    def check_files(
        cls, options: NgramTrieOptions, vocab_size: int, draft_model: str | None
    ) -> None:
        options.check_archive(vocab_size)

    @classmethod
    def keeps_texts(cls, options: NgramTrieOptions) -> bool:
        return options.store_tokens > 0

    def read_prompts(self, requests: Sequence[DraftRequest]) -> None:
        # The backend indexes where it drafts: for one node, which is dropped.
        jobs = []
        for request, text in zip(requests, self._texts.update(requests), strict=True):
            jobs.append(self._job(replace(request, max_nodes=1, max_depth=1), text))
        self._backend.draft_batch(jobs)

    def prepare(
        self, requests: Sequence[DraftRequest], rows: Sequence[int], num_new: int
    ) -> PreparedDrafts | None:
        if type(self).propose is not NgramTrieDrafter.propose:  # a subclass drafts otherwise
            return None
        self._take_in()
        texts = self._texts.ends(requests, num_new)
        if texts is None:
            return None
        jobs = [
            self._job(request, text)._replace(step_row=row)
            for request, text, row in zip(requests, texts, rows, strict=True)
        ]
        request_ids = [request.request_id for request in requests]
        return _PreparedChains(self, request_ids, self._backend.pack(jobs))

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self._take_in()
        texts = self._texts.update(requests)
        jobs = [self._job(request, text) for request, text in zip(requests, texts, strict=True)]
        drafts = self._backend.draft_batch(jobs, self.candidates(requests))
        return self._trees(requests, drafts)

    def continued(
        self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]
    ) -> list[TokenTree]:
        """Return the trees of drafts that were prepared, once the texts have gone on."""
        self._texts.went_on(requests)
        return self._trees(requests, drafts)

    def _take_in(self) -> None:
        """Take in what others have written."""
        self._archive = self._newest_archive()
        if self.store is not None:
            self.store.receive(_STORE_STEP_TOKENS)
            self.store.take_in(_STORE_STEP_TOKENS)

    def _trees(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> list[TokenTree]:
        """Return the trees of drafts, and let the store know which of its texts they used."""
        if self.store is not None:
            for request, draft in zip(requests, drafts, strict=True):
                self.store.mark_used(request.cache_salt, draft.used_text)
        return [draft.tree for draft in drafts]

    def candidates(self, requests: Sequence[DraftRequest]) -> Candidates | None:
        """Return predictions of heads for the requests; a subclass may have them."""
        return None

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        self._texts.release(request.request_id)
        if self.store is not None and len(output):
            self.store.add(request.cache_salt, output, self._prompt(request))
        self._prompts.pop(request.request_id, None)

    def reset(self) -> None:
        if self.store is not None:
            self.store.clear()
        if self.recycling is not None:
            self.recycling.clear()

    def _prompt(self, request: DraftRequest) -> bytes:
        """Return the fingerprint of a request's prompt, which the first call makes."""
        length, prompt = self._prompts.get(request.request_id, (-1, b""))
        if length != request.num_prompt_tokens:
            tokens = request.token_ids[: request.num_prompt_tokens]
            prompt = prompt_print(request.cache_salt, tokens)
            self._prompts[request.request_id] = request.num_prompt_tokens, prompt
            if self.store is not None:
                self.store.listen(request.cache_salt)
        return prompt

    def _job(self, request: DraftRequest, text: IndexedText) -> Job:
        """Return the job that drafts after a request's text."""
        prompt = self._prompt(request)
        return Job(
            own=text.own,
            store=None if self.store is None else self.store.index(request.cache_salt),
            archive=self._archive,
            tokens=text.tokens,
            num_indexed=text.num_indexed,
            max_nodes=request.max_nodes,
            max_depth=request.max_depth,
            chain_only=request.chain_only,
            min_probability=request.min_probability,
            recycled=None if self.recycling is None else self.recycling.table,
            rows=request.rows,
            scope=0 if self.recycling is None else self.recycling.scope(request.cache_salt),
            first=text.first,
            text=text.text,
            answer=-1 if self.store is None else self.store.answer(request.cache_salt, prompt),
            output_begin=request.num_prompt_tokens - text.first,
            prompt=int.from_bytes(prompt[:4], "little", signed=True),
            is_sampled=request.is_sampled,
        )


class _PreparedChains(PreparedDrafts):
    """Packed jobs, one for each request."""

    def __init__(
        self, drafter: NgramTrieDrafter, request_ids: Sequence[str], jobs: PackedJobs
    ) -> None:
        self.request_ids = request_ids
        self._drafter, self._jobs = drafter, jobs

    def draft(self, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._jobs.draft((tokens, counts))

    def trees(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        drafts = dict(zip(self.request_ids, self._jobs.drafts(), strict=True))
        return self._drafter.continued(requests, [drafts[r.request_id] for r in requests])
