"""Trees to merge, and parts with a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st

from tests.unit.drafters.support import make_context
from vllm_trie.drafts import Drafter, DraftRequest
from vllm_trie.drafts.drafter import DrafterOptions
from vllm_trie.extras.union import TrieUnionDrafter, TrieUnionOptions
from vllm_trie.tree import TokenTree

VOCAB = 40


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 8) -> TokenTree:
    """A trie over few tokens with path probabilities."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5))
    tree = TokenTree.from_paths(paths, max_nodes)
    edges = draw(st.lists(st.floats(0.01, 0.99), min_size=tree.num_nodes, max_size=tree.num_nodes))
    probabilities: list[float] = []
    for parent, edge in zip(tree.parents.tolist(), edges, strict=True):
        probabilities.append(edge * (probabilities[parent] if parent >= 0 else 1.0))
    return TokenTree.from_lists(tree.token_ids.tolist(), tree.parents.tolist(), probabilities)


class NoOptions(DrafterOptions):
    """None."""


class Scripted(Drafter):
    """Drafts what a function of the request says; notes its calls and what it must forget."""

    name: ClassVar[str] = "scripted"
    Options = NoOptions

    def __init__(
        self, script: Callable[[DraftRequest], TokenTree], needs_node_argmax: bool = False
    ) -> None:
        super().__init__(NoOptions(), make_context(vocab_size=VOCAB))
        self.script = script
        self.needs_node_argmax = needs_node_argmax  # type: ignore[misc]
        self.calls: list[str] = []
        self.ended: list[str] = []
        self.last_requests: dict[str, DraftRequest] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenTree]:
        self.calls += [request.request_id for request in requests]
        self.last_requests.update({request.request_id: request for request in requests})
        return [self.script(request) for request in requests]

    def released(self, request: DraftRequest, output: np.ndarray) -> None:
        self.ended.append(request.request_id)


def make_union(parts: Sequence[Drafter], num_nodes: int = 32, **options: Any) -> TrieUnionDrafter:
    """A union of these parts."""
    context = make_context(num_nodes=num_nodes, vocab_size=VOCAB)
    return TrieUnionDrafter(TrieUnionOptions.model_validate(options), context, parts)
