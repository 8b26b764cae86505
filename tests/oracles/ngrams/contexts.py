"""Contexts in the readable index: those at the end of a text, and their successors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.oracles.ngrams.index import NgramIndex, Node, Place

Match = Node | Place
"""A context that occurred: its node, or, past the end of the nodes, its last token's place."""


Counts = list[tuple[int, int]]
"""(token, times that it was counted), most often first."""


class Counted(NamedTuple):
    """The successors of a context."""

    likeliest: Counts
    """(successor, its types) of the likeliest."""
    num_types: int
    """Sum over all successors."""
    num_successors: int


def count_listed(counts: Counts) -> Counted:
    """Return successors that are all listed, the most frequent first."""
    return Counted(counts, sum(count for _, count in counts), len(counts))


def match_suffix(index: NgramIndex, token_ids: Sequence[int]) -> list[Match]:
    """Return the contexts at the end of a text, by length. If one occurred, so did all shorter."""
    matches: list[Match] = [index.root]
    for token in token_ids[-index.max_order :]:
        matches = advance(index, matches, int(token))
    return matches


def advance(index: NgramIndex, contexts: list[Match], token: int) -> list[Match]:
    """Return the contexts that end one token later."""
    longer: list[Match] = [index.root]
    for match in contexts[: index.max_order]:
        child = _follow(index, match, token)
        if child is None:
            break
        longer.append(child)
    return longer


def count_successors(index: NgramIndex, match: Match) -> Counted:
    """Return the successors of a context."""
    place = _once(match)
    if place is not None:
        token = index.token_at(Place(place.text, place.position + 1))
        return count_listed([(token, 1)] if token >= 0 else [])
    assert isinstance(match, Node)
    successors = [(child.token, child.types) for child in match.hot]
    return Counted(successors, match.child_types, len(match.children))


def _follow(index: NgramIndex, match: Match, token: int) -> Match | None:
    place = _once(match)
    if place is not None:
        after = Place(place.text, place.position + 1)
        return after if index.token_at(after) == token else None
    assert isinstance(match, Node)
    return match.children.get(token)


def _once(match: Match) -> Place | None:
    """Return where a context that occurred once ends, None if it occurred more often."""
    return match if isinstance(match, Place) else match.once
