"""The trees that a step verifies, from the draft tokens that the scheduler sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm_trie.tree import TokenTree


def scheduled_tree(stored: TokenTree | None, scheduled: Sequence[int]) -> TokenTree:
    """Return the tree that a request's scheduled draft tokens stand for.

    vLLM's scheduler carries a flat list of tokens and may cut it or fill it with placeholders
    (-1). A prefix of the stored tree's tokens is that part of the tree. Any other list is verified
    as a chain, which is right for every list of tokens.
    """
    num_nodes = len(scheduled)
    if stored is not None and stored.token_list[:num_nodes] == scheduled:
        return stored.prefix(num_nodes)
    return TokenTree.from_lists(scheduled, range(-1, num_nodes - 1))


def trees_of_step(
    stored: Mapping[str, TokenTree],
    scheduled: Mapping[str, Sequence[int]],
    request_ids: Sequence[str],
) -> list[TokenTree]:
    """Return the tree of each request of the batch; empty for requests without a draft.

    Args:
        stored: proposed trees by request id.
        scheduled: draft tokens by request id.
        request_ids: of the batch, in its order.
    """
    return [
        scheduled_tree(stored.get(request_id), scheduled[request_id])
        if request_id in scheduled
        else TokenTree.empty()
        for request_id in request_ids
    ]
