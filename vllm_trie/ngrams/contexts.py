"""Contexts in the readable index: those at the end of a text, and what followed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_trie.ngrams.index import NgramIndex, Node, Place

Match = Node | Place
"""A context that occurred: its node, or, past the end of the nodes, its last token's place."""


class Counted(NamedTuple):
    """What followed a context."""

    likeliest: list[tuple[int, int]]
    """(successor, its types) of the likeliest."""
    num_types: int
    """Sum over all successors."""
    num_successors: int


def match_suffix(index: NgramIndex, token_ids: Sequence[int]) -> list[Match]:
    """The contexts at the end of a text, by length. If one occurred, so did all shorter."""
    matches: list[Match] = [index.root]
    for length in range(1, min(index.max_order, len(token_ids)) + 1):
        match: Match | None = index.root
        for token in token_ids[len(token_ids) - length :]:
            match = _follow(index, match, int(token))
            if match is None:
                return matches
        matches.append(match)
    return matches


def advance(index: NgramIndex, contexts: list[Match], token: int) -> list[Match]:
    """The contexts that end one token later."""
    longer: list[Match] = [index.root]
    for match in contexts[: index.max_order]:
        child = _follow(index, match, token)
        if child is None:
            break
        longer.append(child)
    return longer


def count_successors(index: NgramIndex, match: Match) -> Counted:
    """What followed a context."""
    place = match if isinstance(match, Place) else match.once
    if place is not None:
        token = index.token_at(Place(place.text, place.position + 1))
        return Counted([(token, 1)], 1, 1) if token >= 0 else Counted([], 0, 0)
    successors = [(child.token, child.types) for child in match.hot]
    return Counted(successors, match.child_types, len(match.children))


def _follow(index: NgramIndex, match: Match, token: int) -> Match | None:
    place = match if isinstance(match, Place) else match.once
    if place is not None:
        after = Place(place.text, place.position + 1)
        return after if index.token_at(after) == token else None
    return match.children.get(token)
