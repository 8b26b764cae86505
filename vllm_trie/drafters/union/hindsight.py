"""What each part was worth, judged once the text has gone on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_trie.drafters.union.merge import MergedTrie

HORIZON = 20
"""Tokens after which a draft is judged; deeper nodes are not looked at."""


@dataclass(slots=True)
class Draft:
    """A step's candidates, those that did not make it into the tree included.

    Attributes:
        merged: the candidates.
        probabilities: of each merged node being accepted.
        overhead: for each part that drafted the nodes that it spends on what is never accepted
            (the lookahead window).
        budget: nodes that the step's tree may have.
        num_tokens: length of the text that was drafted after.
    """

    merged: MergedTrie
    probabilities: list[float]
    overhead: dict[int, int]
    budget: int
    num_tokens: int
    order: list[int] = field(init=False)
    """Nodes, the likeliest first; parents come before children."""

    def __post_init__(self) -> None:
        negative = [-p for p in self.probabilities]
        self.order = sorted(range(len(negative)), key=negative.__getitem__)

    def selected(self) -> list[int]:
        """Merged nodes that fit beside the overhead, parents before children."""
        return sorted(self.order[: self.budget - sum(self.overhead.values())])


class Worth(NamedTuple):
    """What a part was worth in a step, in accepted tokens."""

    gross: int | None
    """Tokens that were accepted thanks to its candidates; None if it did not draft."""
    cost: int
    """Tokens that others' candidates would have brought in the place of its overhead."""


class Judgement(NamedTuple):
    """What a step was worth."""

    num_tokens: int
    """Output tokens: the accepted ones and the bonus token."""
    worth: dict[int, Worth]


def judge(draft: Draft, continuation: Sequence[int], resting: Mapping[int, int]) -> Judgement:
    """Judge a draft by the text that followed.

    Args:
        draft: a step's candidates.
        continuation: the tokens after those that were drafted after, `HORIZON` of them.
        resting: parts that did not draft, with the overhead they would have had.
    """
    path = set(draft.merged.true_path(continuation))
    taken = sum(draft.overhead.values())
    with_all = _num_accepted(draft, path, draft.budget - taken)
    worth = {}
    for part, overhead in draft.overhead.items():
        same_room = _num_accepted(draft, path, draft.budget - taken, without=part)
        more_room = same_room
        if overhead:
            more_room = _num_accepted(draft, path, draft.budget - taken + overhead, without=part)
        worth[part] = Worth(with_all - same_room, more_room - same_room)
    for part, overhead in resting.items():
        cost = 0
        if overhead:
            cost = with_all - _num_accepted(draft, path, draft.budget - taken - overhead)
        worth[part] = Worth(None, cost)
    return Judgement(with_all + 1, worth)


def _num_accepted(draft: Draft, path: set[int], budget: int, without: int | None = None) -> int:
    """Nodes of the true path among the likeliest `budget`, if `without` proposed nothing."""
    taken = found = 0
    edges = draft.merged.edges
    for node in draft.order:
        if taken >= budget or found == len(path):
            break
        if without is not None and without in edges[node] and len(edges[node]) == 1:
            continue
        taken += 1
        found += node in path
    return found
