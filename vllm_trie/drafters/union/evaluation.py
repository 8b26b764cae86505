"""Evaluation of a draft by the text that followed it: the gain of each part."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_trie.drafters.union.merge import Draft

HORIZON = 20
"""Tokens that must follow a draft before its evaluation; deeper nodes are ignored."""


def evaluate(draft: Draft, continuation: Sequence[int]) -> dict[int, int]:
    """Return the tokens that only each part contributed, of the parts that drafted: compare a
    step's tree with the trees it would have been without them.

    Args:
        draft: The step's candidates.
        continuation: The `HORIZON` tokens that followed the draft.
    """
    path = set(draft.merged.true_path(continuation))
    with_all = _num_accepted(draft, path)
    return {part: with_all - _num_accepted(draft, path, without=part) for part in draft.parts}


def _num_accepted(draft: Draft, path: set[int], without: int | None = None) -> int:
    """Count the nodes of the true path in the tree, if `without` had not drafted."""
    taken = accepted = 0
    edges, parents = draft.merged.edges, draft.merged.parents
    missing: set[int] = set()
    for node in draft.order:
        if taken >= draft.max_nodes or accepted == len(path):
            break
        if without is not None and (
            parents[node] in missing or (without in edges[node] and len(edges[node]) == 1)
        ):
            missing.add(node)
            continue
        taken += 1
        accepted += node in path
    return accepted
