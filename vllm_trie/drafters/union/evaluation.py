"""Evaluation of a draft by the text that followed it: the gain and the cost of each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vllm_trie.drafters.union.merge import Draft

HORIZON = 20
"""Tokens that must follow a draft before its evaluation; deeper nodes are ignored."""


class PartEvaluation(NamedTuple):
    """One part in one step, in accepted tokens."""

    gain: float | None
    """Tokens that only this part's candidates contributed; None if the part did not draft."""
    cost: float
    """Tokens that other parts' candidates would contribute in place of this part's window. Other
    costs of a part, such as its drafting time, can be added here once they are in tokens."""


class StepEvaluation(NamedTuple):
    """One step."""

    num_tokens: int
    """Output tokens: the accepted ones and the bonus token."""
    parts: dict[int, PartEvaluation]


def evaluate(
    draft: Draft, continuation: Sequence[int], suspended: Mapping[int, int]
) -> StepEvaluation:
    """Compare a step's tree with the trees it would have been without each part.

    Args:
        draft: the step's candidates.
        continuation: the `HORIZON` tokens that followed the draft.
        suspended: parts that did not draft, with the size that their windows would have had.
    """
    path = set(draft.merged.true_path(continuation))
    room = draft.num_candidates
    with_all = _num_accepted(draft, path, room)
    parts = {}
    for part, window in draft.windows.items():
        same_room = _num_accepted(draft, path, room, without=part)
        more_room = same_room
        if window:
            more_room = _num_accepted(draft, path, room + window, without=part)
        parts[part] = PartEvaluation(with_all - same_room, more_room - same_room)
    for part, window in suspended.items():
        less_room = _num_accepted(draft, path, room - window) if window else with_all
        parts[part] = PartEvaluation(None, with_all - less_room)
    return StepEvaluation(with_all + 1, parts)


def _num_accepted(draft: Draft, path: set[int], room: int, without: int | None = None) -> int:
    """Count the nodes of the true path among the likeliest `room`, if `without` had not drafted."""
    taken = found = 0
    edges, parents = draft.merged.edges, draft.merged.parents
    missing: set[int] = set()
    for node in draft.order:
        if taken >= room or found == len(path):
            break
        if without is not None and (
            parents[node] in missing or (without in edges[node] and len(edges[node]) == 1)
        ):
            missing.add(node)
            continue
        taken += 1
        found += node in path
    return found
