"""Tokens that a grammar leaves no choice for, as drafts of requests with structured outputs.

The names, quotes and braces of a JSON schema are known before the model says them. vLLM cuts a
draft where the grammar forbids its next token; from there the draft goes on with what the grammar
forces. The model may spell a forced text with other tokens than the longest ones, so these are
drafts as others are.

Where the same tokens are allowed as before in a request, the draft goes on with the one it took
then: the space behind a colon, the comma behind a value.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from vllm_trie.drafts.engine.scheduler.grammar_time import TimedGrammar
from vllm_trie.hooks.ledger.record import Symbols
from vllm_trie.hooks.wire import may_draft_on_v1

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

STEP_SECONDS = 0.002
"""Time that a step may take, for all requests together."""
_MOST_TOKENS = 64
"""Allowed tokens beyond which a text is not forced."""
_MOST_CHOICES = 2
"""Tokens of a draft that are not forced."""
_MOST_WORDS = 512
"""Words of a mask beyond which the text is free."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_uses = Symbols("v1.structured_output.backend_types:", "vLLM drafts what a grammar forces")
_uses(
    "StructuredOutputBackend.allocate_token_bitmask",
    "called",
    "the mask of one token",
    "max_num_seqs",
)


class _TakenTokens:
    """The tokens that a request took last, by the tokens that its grammar allowed there."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        self._start = 0  # of the last draft, in the output
        self._draft: list[int] = []
        self._allowed: list[tuple[int, int]] = []  # positions in the draft, and what they allow

    def learn(self, output: Sequence[int]) -> None:
        """Take in what the output has at the last draft's positions, and start another draft."""
        tokens = list(output[self._start : self._start + len(self._draft) + 1])
        for position, allowed in self._allowed:
            if position < len(tokens) and tokens[:position] == self._draft[:position]:
                self._tokens[allowed] = tokens[position]
        self._allowed, self._start = [], len(output)

    def after(self, draft: list[int], words: np.ndarray) -> int | None:
        """Return the token that was taken where the same were allowed as now behind the draft.

        Args:
            draft: Its next tokens are appended to this list.
            words: int32 [words], a bit for each allowed token.
        """
        if np.count_nonzero(words) > _MOST_WORDS:
            return None
        allowed = hash(words.tobytes())
        self._draft = draft
        self._allowed.append((len(draft), allowed))
        return self._tokens.get(allowed)


class ForcedTokens:
    """Extends drafts by the tokens that a grammar forces.

    Args:
        scheduler: vLLM's, of Model Runner V1 without asynchronous scheduling.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._failed: set[str] = set()  # running requests whose drafts cannot be extended
        self._reported = False
        self._scheduler = scheduler
        self._manager = scheduler.structured_output_manager
        self._mask: torch.Tensor | None = None  # int32 [1, words]
        self._texts: dict[int, str] = {}  # of tokens
        self._taken: dict[str, _TakenTokens] = {}  # of the running requests

    def extend_drafts(self) -> None:
        """Extend the drafts of the running requests, while the step's time lasts."""
        requests = [r for r in self._scheduler.running if r.use_structured_output]
        if not requests:
            return
        deadline = time.perf_counter() + STEP_SECONDS
        self._taken = {
            r.request_id: self._taken.get(r.request_id) or _TakenTokens() for r in requests
        }
        self._failed.intersection_update(self._taken)
        for request in requests:
            if request.request_id not in self._failed:
                try:
                    self._extend(request, deadline)
                except Exception:
                    self._leave_out(request)

    def _leave_out(self, request: Request) -> None:
        """Extend no draft of a request any more; log the first."""
        self._failed.add(request.request_id)
        level = logging.DEBUG if self._reported else logging.ERROR
        self._reported = True
        message = "vllm-trie: no forced tokens are drafted for request %s"
        logger.log(level, message, request.request_id, exc_info=True)

    def _extend(self, request: Request, deadline: float) -> None:
        grammar = self._grammar_of(request)
        if grammar is None:
            return
        most = min(self._longest_draft(request), grammar.num_affordable)
        if len(request.spec_token_ids) < most and time.perf_counter() < deadline:
            taken = self._taken[request.request_id]
            taken.learn(request.output_token_ids)
            draft = request.spec_token_ids
            request.spec_token_ids = self._extended(grammar, draft, most, deadline, taken)

    def _grammar_of(self, request: Request) -> TimedGrammar | None:
        """Return the matcher of a request whose next token it decides, None for others."""
        structured = request.structured_output_request
        if structured is None or request.is_prefill_chunk or not may_draft_on_v1(request):
            return None
        manager = self._manager
        is_thinking = manager.reasoner_cls is not None and not structured.reasoning_ended
        grammar = structured.grammar
        if not isinstance(grammar, TimedGrammar) or grammar.is_terminated():
            return None
        return None if is_thinking and not manager.enable_in_reasoning else grammar

    def _longest_draft(self, request: Request) -> int:
        """Return how many tokens a draft may have."""
        return min(
            self._scheduler.num_spec_tokens,
            request.max_tokens - request.num_output_tokens - 1,
            self._scheduler.max_model_len - request.num_tokens - 1,
        )

    def _extended(
        self,
        grammar: TimedGrammar,
        draft: list[int],
        most: int,
        deadline: float,
        taken: _TakenTokens,
    ) -> list[int]:
        """Return a draft with more tokens, at most `most` in all; the matcher stays where it is."""
        mask = self._mask
        if mask is None:
            assert self._manager.backend is not None
            mask = self._mask = self._manager.backend.allocate_token_bitmask(1)
        words = mask.numpy()[0]
        extended: list[int] = []  # what the matcher has taken
        try:
            for token in draft:
                if grammar.is_terminated() or not grammar.accept_tokens("", [token]):
                    return draft
                extended.append(token)
            choices = 0
            while len(extended) < most and time.perf_counter() < deadline:
                if grammar.is_terminated():
                    break
                grammar.fill_bitmask(mask, 0)
                forced, next_token = self._only(words), taken.after(extended, words)
                choices += forced is None
                next_token = forced if next_token is None else next_token
                if next_token is None or choices > _MOST_CHOICES:
                    break
                if not grammar.accept_tokens("", [next_token]):
                    break
                extended.append(next_token)
        finally:
            if extended:
                grammar.rollback(len(extended))
        return extended

    def _only(self, words: np.ndarray) -> int | None:
        """Return the longest of the allowed tokens if the others are beginnings of it.

        Args:
            words: int32 [words], a bit for each token.
        """
        word_numbers = np.flatnonzero(words)
        if not 0 < len(word_numbers) <= _MOST_TOKENS:
            return None
        bits = np.unpackbits(words[word_numbers].view(np.uint8), bitorder="little").reshape(-1, 32)
        rows, columns = np.nonzero(bits)
        tokens = (word_numbers[rows] * 32 + columns).tolist()
        if len(tokens) > _MOST_TOKENS:
            return None
        texts = self._texts_of(tokens)
        longest = max(texts, key=len)
        if not longest or not all(text and longest.startswith(text) for text in texts):
            return None
        return int(tokens[texts.index(longest)])

    def _texts_of(self, tokens: Iterable[int]) -> list[str]:
        """Return the texts of tokens, empty for special ones."""
        tokens = list(tokens)
        unknown = [token for token in tokens if token not in self._texts]
        if unknown:
            tokenizer = self._manager.tokenizer
            special = set(tokenizer.all_special_ids)
            for token, text in zip(unknown, tokenizer.convert_ids_to_tokens(unknown), strict=True):
                byte = _BYTE.fullmatch(text or "")
                text = chr(int(byte[1], 16)) if byte else text or ""
                self._texts[token] = "" if token in special else text
        return [self._texts[token] for token in tokens]
