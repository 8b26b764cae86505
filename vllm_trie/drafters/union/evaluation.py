"""Evaluation of a draft by the text that followed it: the gain and the cost of each part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_trie.drafters.union.merge import Draft

HORIZON = 20
"""Tokens that must follow a draft before its evaluation; deeper nodes are ignored."""


class PartEvaluation(NamedTuple):
    """One part in one step, in accepted tokens."""

    gain: int
    """Tokens that only this part's candidates contributed."""
    cost: int
    """Tokens that other parts' candidates would contribute in place of this part's window."""

    @property
    def net_gain(self) -> int:
        return self.gain - self.cost


def evaluate(draft: Draft, continuation: Sequence[int]) -> dict[int, PartEvaluation]:
    """Compare a step's tree with the trees it would have been without each part that drafted.

    Args:
        draft: The step's candidates.
        continuation: The `HORIZON` tokens that followed the draft.
    """
    path = set(draft.merged.true_path(continuation))
    room = draft.num_candidates
    with_all = _num_accepted(draft, path, room)
    evaluation = {}
    for part, window in draft.windows.items():
        same_room = more_room = _num_accepted(draft, path, room, without=part)
        if window:
            more_room = _num_accepted(draft, path, room + window, without=part)
        evaluation[part] = PartEvaluation(with_all - same_room, more_room - same_room)
    return evaluation


def _num_accepted(draft: Draft, path: set[int], room: int, without: int | None = None) -> int:
    """Count the nodes of the true path among the likeliest `room`, if `without` had not drafted."""
    taken = accepted = 0
    edges, parents = draft.merged.edges, draft.merged.parents
    missing: set[int] = set()
    for node in draft.order:
        if taken >= room or accepted == len(path):
            break
        if without is not None and (
            parents[node] in missing or (without in edges[node] and len(edges[node]) == 1)
        ):
            missing.add(node)
            continue
        taken += 1
        accepted += node in path
    return accepted
