"""A context and requests for drafter tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.unit.tree.strategies import paths_of
from vllm_trie.drafts import Drafter, DrafterContext, DraftRequest, get_drafter_class
from vllm_trie.drafts.registry import parse_options
from vllm_trie.drafts.text_store import TextStore
from vllm_trie.tree import TokenTree

VOCAB = 1000


def make_context(**changes: Any) -> DrafterContext:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "num_nodes": 32,
        "hidden_size": 16,
    }
    return DrafterContext(**{**values, **changes})


def make_drafter(
    method: str = "ngram_trie", text_stores: Sequence[TextStore] = (), **options: Any
) -> Drafter:
    context = make_context(text_stores=text_stores)
    return get_drafter_class(method)(parse_options(method, options), context)


def make_request(
    token_ids: Sequence[int],
    request_id: str = "a",
    num_prompt_tokens: int | None = None,
    max_nodes: int = 32,
    max_depth: int = 100,
    **more: Any,
) -> DraftRequest:
    return DraftRequest(
        request_id,
        np.array(token_ids, dtype=np.int32),
        len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        max_nodes,
        max_depth,
        **more,
    )


def end(drafter: Drafter, request: DraftRequest | str) -> None:
    """End a request as the engine does; one that is named has no output."""
    if isinstance(request, str):
        request = make_request([1], request)
    drafter.released(request, request.token_ids[request.num_prompt_tokens :])


def by_path(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The probability of each node, by the tokens that lead to it."""
    probabilities = [] if tree.probabilities is None else tree.probabilities.tolist()
    return dict(zip(paths_of(tree), probabilities, strict=True))
