"""What each part was worth, judged once the text has gone on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_trie.drafters.union.merge import MergedTrie

HORIZON = 20
"""Tokens after which a draft is judged; deeper nodes are not looked at."""


@dataclass(slots=True)
class Draft:
    """A step's candidates, those that did not make it into the tree included.

    Attributes:
        merged: the candidates.
        probabilities: of each merged node being accepted.
        overhead: nodes that each part spends on what is never accepted (the lookahead window).
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

    def selected(self, overhead: int) -> list[int]:
        """Merged nodes that fit beside `overhead` others, parents before children."""
        return sorted(self.order[: max(0, self.budget - overhead)])


def gains(draft: Draft, continuation: Sequence[int]) -> dict[int, int]:
    """For each part of a draft, how many more tokens were accepted because it took part.

    Without a part, the nodes that nobody else proposes are missing, and its overhead leaves room
    for others: a part can be worth less than nothing.
    """
    path = set(draft.merged.true_path(continuation))
    overhead = sum(draft.overhead.values())
    with_all = _num_accepted(draft, path, draft.budget - overhead, without=None)
    return {
        part: with_all - _num_accepted(draft, path, draft.budget - overhead + own, without=part)
        for part, own in draft.overhead.items()
    }


def _num_accepted(draft: Draft, path: set[int], budget: int, without: int | None) -> int:
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
