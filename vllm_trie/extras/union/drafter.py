"""The method `trie_union`: n-grams and the heads of a model in one tree.

Contexts of the text predict a node's children, the longest first, and the head of that depth shares
what they leave. So heads draft where the text is new, and n-grams go on after the heads' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import BaseModel

from vllm_trie.drafts import registry
from vllm_trie.drafts.drafter import DrafterContext, DraftRequest
from vllm_trie.drafts.ngram_trie.drafter import BLEND, SAMPLED, NgramTrieDrafter
from vllm_trie.drafts.ngrams import Blend, Candidates, NativeBackend
from vllm_trie.extras.union.options import HEADS, METHOD, TrieUnionOptions

if TYPE_CHECKING:
    from torch import nn


class HeadSource(Protocol):
    """Predicts the next tokens of requests, each position by a head."""

    def candidates(self, requests: Sequence[DraftRequest]) -> Candidates:
        """Return the candidates of each request's heads."""


class TrieUnionDrafter(NgramTrieDrafter):
    """Drafts from n-grams of earlier text and from one source of heads.

    Attributes:
        heads: Medusa's, or a trained drafter's once the engine has made it; None without either.
    """

    name: ClassVar[str] = METHOD
    Options: ClassVar[type[BaseModel]] = TrieUnionOptions

    def __init__(self, options: TrieUnionOptions, context: DrafterContext) -> None:
        backend = None
        if len(options.drafters) > 1:
            backend = NativeBackend(*(with_heads(blend) for blend in (BLEND, SAMPLED)))
        super().__init__(options.text, context, backend)
        self.heads: HeadSource | None = None
        self._medusa: Any = None
        if HEADS in options.drafters:
            self._medusa = registry.get_drafter_class(HEADS)(options.heads, context)
            self.heads = self._medusa
            self.needs_hidden_states = True

    @classmethod
    def check_files(cls, options: Any, vocab_size: int, draft_model: str | None) -> None:
        super().check_files(options.text, vocab_size, draft_model)
        if HEADS in options.drafters:
            heads = registry.get_drafter_class(HEADS)
            heads.check_files(options.heads, vocab_size, draft_model)

    @classmethod
    def keeps_texts(cls, options: Any) -> bool:
        return super().keeps_texts(options.text)

    def load_model(self, target_model: nn.Module) -> None:
        if self._medusa is not None:
            self._medusa.load_model(target_model)

    def candidates(self, requests: Sequence[DraftRequest]) -> Candidates | None:
        return None if self.heads is None else self.heads.candidates(requests)


def with_heads(blend: Blend) -> Blend:
    """Return a blend that leaves to heads what is frequent in general, which they know better: its
    shortest context is one token."""
    return blend._replace(min_order=1, min_left_for_heads=1e-6)
