"""Bias, allowed tokens and grammar of a group, which the worker counts in when it selects.

vLLM has a matcher for each request with a grammar and moves it forward. A group has one matcher for
all its hypotheses. They share beginnings, so it walks their trie: from one hypothesis to the next
it takes back the tokens that differ and takes the new ones. A beam holds no state of the grammar,
so forks and preemption leave it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_trie.searches.blocks import TokenRules

if TYPE_CHECKING:
    import torch
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


class GrammarMasks:
    """The tokens that a grammar lets follow hypotheses.

    Args:
        grammar: The matcher, before its first token. Moved from here on by this object only.
        masks: int32[hypotheses, words], as the grammar's backend allocates it.
    """

    def __init__(self, grammar: StructuredOutputGrammar, masks: torch.Tensor) -> None:
        self._grammar = grammar
        self._masks = masks
        self._tokens: list[int] = []  # that the matcher has taken

    def of(self, hypotheses: Sequence[list[int]]) -> np.ndarray:
        """Return int32[hypotheses, words], the bits of valid tokens; at most those of `masks`.

        Args:
            hypotheses: Generated tokens; none of them may hold a stop token.

        Raises:
            RuntimeError: The grammar refuses a hypothesis.
        """
        for i in sorted(range(len(hypotheses)), key=hypotheses.__getitem__):
            self._go_to(hypotheses[i])
            self._grammar.fill_bitmask(self._masks, i)
        valid: np.ndarray = self._masks[: len(hypotheses)].numpy().copy()
        return valid

    def _go_to(self, tokens: list[int]) -> None:
        pairs = enumerate(zip(self._tokens, tokens, strict=False))
        both = min(len(self._tokens), len(tokens))
        kept = next((i for i, (old, new) in pairs if old != new), both)
        if back := len(self._tokens) - kept:
            try:
                self._grammar.rollback(back)
            except ValueError:  # outlines keeps the last four states
                self._grammar.reset()
                kept = 0
        if tokens[kept:] and not self._grammar.accept_tokens("", tokens[kept:]):
            raise RuntimeError(f"the grammar refuses the tokens {tokens}")
        self._tokens = list(tokens)


class GroupRules:
    """The rules that the worker applies to a group, step by step.

    The proxy runs once they are :attr:`is_ready`, which :meth:`prepare` brings about.
    """

    def __init__(self, request: Request, manager: StructuredOutputManager, vocab_size: int) -> None:
        params = request.sampling_params
        assert params is not None
        biases = sorted((params.logit_bias or {}).items())
        self._biased = np.array([token for token, _ in biases], dtype=np.int64)
        self._bias = np.array([bias for _, bias in biases], dtype=np.float32)
        self._allowed = _packed(params.allowed_token_ids, vocab_size)
        self._structured = request.structured_output_request
        self._manager = manager
        self._grammar: GrammarMasks | None = None
        self._masks = self._allowed  # of the beams, or of all beams alike

    @property
    def is_ready(self) -> bool:
        """Whether the proxy may run: its grammar is compiled."""
        return self._structured is None or self._grammar is not None

    def prepare(self, beam_width: int) -> None:
        """Take the grammar if it is compiled.

        Raises:
            Exception: The grammar does not compile.
        """
        if self._structured is None or self._grammar is not None:
            return
        if (grammar := self._structured.grammar) is not None:
            if isinstance(grammar, Exception):
                raise grammar
            assert self._manager.backend is not None
            masks = self._manager.backend.allocate_token_bitmask(beam_width)
            self._grammar = GrammarMasks(grammar, masks)
            self.advance([[]])

    def advance(self, hypotheses: Sequence[list[int]]) -> None:
        """Take the generated tokens of the group's new beams.

        Raises:
            RuntimeError: The grammar refuses a hypothesis.
        """
        if self._grammar is None:
            return
        self._masks = self._grammar.of(hypotheses)
        if self._allowed is not None:
            words = min(self._masks.shape[1], self._allowed.shape[1])
            self._masks = self._masks[:, :words] & self._allowed[:, :words]

    def of(self, rows: np.ndarray) -> TokenRules:
        """Return the rules of some of the rows of the search."""
        masks = self._masks if self._grammar is None or self._masks is None else self._masks[rows]
        return TokenRules(self._biased, self._bias, masks)


def has_rules(params: SamplingParams) -> bool:
    """Return whether a request has rules that the worker must count in."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.structured_outputs is not None
    )


def _packed(token_ids: Sequence[int] | None, vocab_size: int) -> np.ndarray | None:
    """Return int32[1, words], the bits of tokens; None for no restriction."""
    if token_ids is None:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)[None]
