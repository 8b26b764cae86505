"""Contexts in the readable index: those at the end of a text, and their successors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_trie.ngrams.index import NgramIndex, Node, Place

Match = Node | Place
"""A context that occurred: its node, or, past the end of the nodes, its last token's place."""


class Counted(NamedTuple):
    """The successors of a context."""

    likeliest: list[tuple[int, int]]
    """(successor, its types) of the likeliest."""
    num_types: int
    """Sum over all successors."""
    num_successors: int


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
