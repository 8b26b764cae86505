"""The n-gram indexes of the running requests' own texts.

Samples of one prompt share an index: the prompt is indexed once, and each sample's output is a
branch behind it, so that samples also draft from one another. A call indexes a bounded number of
tokens: long prompts take several steps, and nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_trie.drafts.drafter import DraftRequest
from vllm_trie.drafts.ngrams import NativeBackend, NativeIndex

STEP_TOKENS = 8_192
"""Tokens that a call indexes: about 10 ms."""
INDEX_TOKENS = 2_097_152
"""Tokens that the indexes of running requests hold by default, about 200 bytes each."""


class IndexedText(NamedTuple):
    """The arguments of a :class:`~vllm_trie.drafts.ngrams.Job` that concern a request's text.

    Attributes:
        own: NativeIndex that holds the text; None to draft without it.
        text: Its number there.
        first: Place of `tokens[0]` in the text.
        tokens: int32, contiguous: the end of the text.
        num_indexed: Leading tokens of `tokens` that the index is given.
    """

    own: NativeIndex | None
    text: int
    first: int
    tokens: np.ndarray
    num_indexed: int


@dataclass(slots=True)
class _Prompt:
    """A prompt that samples share."""

    token_ids: np.ndarray
    index: NativeIndex
    num_indexed: int = 0
    num_samples: int = 0


@dataclass(slots=True)
class _Text:
    """A request's text.

    Attributes:
        index: Holds it.
        prompt: What it shares with other samples; None if nothing.
        text: Its number in the index; that of the prompt until all of that is indexed.
        num_indexed: Tokens of the text that are indexed, the prompt's included.
        end: The last of them, as bytes, by which a changed text is known.
    """

    index: NativeIndex
    prompt: _Prompt | None = None
    text: int = 0
    num_indexed: int = 0
    end: bytes = b""


class RequestTexts:
    """Owner of the indexes of running requests.

    Args:
        backend: Makes the indexes.
        max_order: Longest context, in tokens.
        max_tokens: Tokens that all indexes hold; what is beyond is not indexed.
        index_output: Whether outputs are indexed, or prompts alone.

    Attributes:
        num_tokens: Tokens that the indexes hold.
    """

    def __init__(
        self, backend: NativeBackend, max_order: int, max_tokens: int, index_output: bool = True
    ) -> None:
        self._backend = backend
        self._max_order = max_order
        self._max_tokens = max_tokens
        self._index_output = index_output
        self._texts: dict[str, _Text] = {}
        self._prompts: dict[tuple[str, str | None], _Prompt] = {}
        self.num_tokens = 0

    def update(self, requests: Sequence[DraftRequest]) -> list[IndexedText]:
        """Take the requests' new tokens in; texts with few of them come first."""
        texts = [self._text(request) for request in requests]
        missing = [self._end(r) - t.num_indexed for r, t in zip(requests, texts, strict=True)]
        room = min(STEP_TOKENS, self._max_tokens - self.num_tokens)
        if sum(missing) <= room:
            return [self._extend(r, t, room) for r, t in zip(requests, texts, strict=True)]
        indexed: dict[int, IndexedText] = {}
        for i in sorted(range(len(requests)), key=missing.__getitem__):
            before = self.num_tokens
            indexed[i] = self._extend(requests[i], texts[i], room)
            room -= self.num_tokens - before
        return [indexed[i] for i in range(len(requests))]

    def ends(self, requests: Sequence[DraftRequest], num_new: int) -> list[IndexedText] | None:
        """Return the ends of texts that are about to go on, as the compiled core takes them in with
        what follows; None if one is not indexed yet or there is no room.

        :meth:`went_on` follows with the longer texts.

        Args:
            requests: Before their next tokens.
            num_new: The most tokens with which one goes on.
        """
        room = min(STEP_TOKENS, self._max_tokens - self.num_tokens)
        ends = []
        for request in requests:
            text = self._texts.get(request.request_id)
            if text is None or (text.prompt is not None and not text.text):
                return None
            end, length = self._end(request), len(request.token_ids)
            if text.num_indexed != end or text.end != self._last_tokens(request, end):
                return None
            first = max(length - max(self._max_order, 2), 0)
            tokens = np.ascontiguousarray(request.token_ids[first:], dtype=np.int32)
            num_indexed = len(tokens) if self._index_output else 0
            ends.append(IndexedText(text.index, text.text, first, tokens, num_indexed))
        return ends if len(ends) * num_new <= room else None

    def went_on(self, requests: Sequence[DraftRequest]) -> None:
        """Count tokens that the compiled core has taken in."""
        for request in requests:
            self._count(request, self._texts[request.request_id], self._end(request))

    def release(self, request_id: str) -> None:
        """Forget a request."""
        text = self._texts.pop(request_id, None)
        if text is None:
            return
        prompt = text.prompt
        if prompt is None:
            self.num_tokens -= text.num_indexed
            return
        if text.text:
            text.index.remove_text(text.text)
            self.num_tokens -= text.num_indexed - len(prompt.token_ids)
        prompt.num_samples -= 1
        if not prompt.num_samples:
            self.num_tokens -= prompt.num_indexed
            self._prompts = {key: p for key, p in self._prompts.items() if p is not prompt}

    def _end(self, request: DraftRequest) -> int:
        """Return how many tokens of a text are to be indexed."""
        length = len(request.token_ids)
        return length if self._index_output else min(request.num_prompt_tokens, length)

    def _text(self, request: DraftRequest) -> _Text:
        text = self._texts.get(request.request_id)
        if text is not None and text.end != self._last_tokens(request, text.num_indexed):
            self.release(request.request_id)  # it was preempted, and starts again
            text = None
        if text is None:
            prompt = self._shared_prompt(request)
            if prompt is None:
                text = _Text(self._backend.new_index(self._max_order))
            else:
                prompt.num_samples += 1
                text = _Text(prompt.index, prompt)
            self._texts[request.request_id] = text
        if text.prompt is not None and not text.text:
            text.num_indexed = text.prompt.num_indexed
        return text

    def _shared_prompt(self, request: DraftRequest) -> _Prompt | None:
        """Return the prompt that a sample shares; None for a request that is no sample, and for one
        with another prompt."""
        if request.sample_of is None:
            return None
        token_ids = request.token_ids[: request.num_prompt_tokens]
        key = request.sample_of, request.cache_salt
        prompt = self._prompts.get(key)
        if prompt is None:
            index = self._backend.new_index(self._max_order)
            prompt = self._prompts[key] = _Prompt(token_ids.astype(np.int32), index)
        # Front ends choose ids: equal ones do not prove equal prompts.
        return prompt if np.array_equal(prompt.token_ids, token_ids) else None

    def _last_tokens(self, request: DraftRequest, end: int) -> bytes:
        """Return the tokens before a place of a text."""
        return request.token_ids[max(end - self._max_order, 0) : end].tobytes()

    def _count(self, request: DraftRequest, text: _Text, end: int) -> None:
        """Write how many tokens of a text are indexed."""
        self.num_tokens += end - text.num_indexed
        text.num_indexed, text.end = end, self._last_tokens(request, end)

    def _extend(self, request: DraftRequest, text: _Text, room: int) -> IndexedText:
        """Index at most `room` tokens of a text; writes `num_tokens`."""
        if text.prompt is not None and not text.text:
            room -= self._extend_prompt(text, text.prompt, room)
        length, before = len(request.token_ids), text.num_indexed
        end = before
        if text.prompt is None or text.text:  # not behind a prompt that is incomplete
            end = max(before, min(self._end(request), before + room))
        self._count(request, text, end)
        # New tokens come with those before them, which shows whether they continue the text.
        is_new = end > before
        first = before - self._max_order if is_new else length - max(self._max_order, 2)
        first = max(first, 0)
        tokens = np.ascontiguousarray(request.token_ids[first:], dtype=np.int32)
        num_indexed = end - first if is_new else 0
        return IndexedText(text.index, text.text, first, tokens, num_indexed)

    def _extend_prompt(self, text: _Text, prompt: _Prompt, room: int) -> int:
        """Index the prompt of a sample, and begin its branch; return the tokens that this took."""
        before, length = prompt.num_indexed, len(prompt.token_ids)
        if before < length and room > 0:
            end = min(length, before + room)
            prompt.index.add_text(prompt.token_ids[before:end], 0 if before else None)
            prompt.num_indexed = end
            self.num_tokens += end - before
        text.num_indexed = prompt.num_indexed
        if prompt.num_indexed == length:
            text.text = prompt.index.begin_branch(prompt.token_ids[-self._max_order :])
        return prompt.num_indexed - before
