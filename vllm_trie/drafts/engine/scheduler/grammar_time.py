"""The scheduler's time for drafts under grammars.

vLLM checks each draft token against the request's grammar, moves the matcher over it and fills a
mask behind it. Regular expressions as short as ``(a*)*b`` cost a token milliseconds, and the whole
batch waits for them. Such drafts are shortened, down to none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from vllm_trie.drafts.engine import config
from vllm_trie.hooks.ledger.record import Symbols

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

REQUEST_SECONDS = 0.002
"""Processor time that the draft of a request may take in a step."""
_PASSES = 3
"""A matcher goes over a draft: checked, extended, masked."""
_MASKS = 2
"""Masks of a draft token: to extend the draft, and to sample."""
_FIRST = 4
"""Tokens of a draft that are checked before the others: a grammar's cost can rise steeply."""

_manager = Symbols("v1.structured_output:StructuredOutputManager.", "vLLM bounds this time")


class TimedGrammar(StructuredOutputGrammar):
    """A request's grammar that measures its own processor time."""

    def __init__(self, grammar: StructuredOutputGrammar) -> None:
        self._grammar = grammar
        self._token_seconds = 0.0  # moving averages
        self._mask_seconds = 0.0

    @property
    def num_affordable(self) -> int:
        """Draft tokens that take `REQUEST_SECONDS`."""
        seconds = _PASSES * self._token_seconds + _MASKS * self._mask_seconds
        return int(REQUEST_SECONDS / max(seconds, 1e-9))

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        start = time.thread_time()
        accepted = self._grammar.accept_tokens(request_id, tokens)
        self._count(start, len(tokens))
        return accepted

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        start = time.thread_time()
        valid = self._grammar.validate_tokens(tokens)
        self._count(start, min(len(valid) + 1, len(tokens)))
        return valid

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        start = time.thread_time()
        self._grammar.fill_bitmask(bitmask, batch_index)
        self._mask_seconds += (time.thread_time() - start - self._mask_seconds) / 2

    def _count(self, start: float, num_tokens: int) -> None:
        seconds = (time.thread_time() - start) / max(num_tokens, 1)
        self._token_seconds += (seconds - self._token_seconds) / 2

    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)

    def is_terminated(self) -> bool:
        return self._grammar.is_terminated()

    def reset(self) -> None:
        self._grammar.reset()


@_manager.wraps("_create_grammar", "measures the time of each request's grammar")
def create_grammar(
    original: Callable[..., StructuredOutputGrammar],
    self: StructuredOutputManager,
    request: Request,
) -> StructuredOutputGrammar:
    grammar = original(self, request)
    parallel = self.vllm_config.parallel_config
    # There each rank has a scheduler, and they must shorten a draft alike, whatever their time.
    has_schedulers = (
        parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1
    )
    if has_schedulers or config.read(self.vllm_config) is None:
        return grammar
    return TimedGrammar(grammar)


@_manager.wraps("validate_tokens", "shortens drafts whose grammar takes much time")
def validate_tokens(
    original: Callable[..., list[int]],
    self: StructuredOutputManager,
    request: Request,
    spec_tokens: list[int],
) -> list[int]:
    """Return the beginning of a draft that the grammar allows, as far as its time goes.

    Not in :class:`TimedGrammar`: vLLM 0.33 also asks grammars whether a single token is allowed.
    """
    structured = request.structured_output_request
    grammar = None if structured is None else structured.grammar
    if not isinstance(grammar, TimedGrammar):
        return original(self, request, spec_tokens)
    length = _FIRST
    while True:
        valid = original(self, request, spec_tokens[: min(length, grammar.num_affordable)])
        if len(valid) < length or length >= len(spec_tokens):
            return valid[: grammar.num_affordable]
        length *= 4
