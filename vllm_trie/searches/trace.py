"""The whole trie of a finished search, for drawings."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class NodeFate(StrEnum):
    """Outcome of the step that looked at a candidate."""

    KEPT = "kept"
    DROPPED = "dropped"
    FINISHED = "finished"


class SearchTrace(NamedTuple):
    """Every candidate that a search looked at, as a trie in flat lists, which make up its JSON.

    Node ``i`` is token ``token_ids[i]`` below node ``parents[i]`` (-1: below the prompt); parents
    come before children.

    Attributes:
        token_ids: Token of each node.
        parents: Parent of each node.
        sums: Sum of log-probabilities from the prompt to the node.
        fates: A :class:`NodeFate` per node.
        returned: Nodes of the hypotheses that were returned, best first.
        scores: Their length-normalized scores.
        steps: Steps of the search.
        beam_width: Its width.
    """

    token_ids: list[int]
    parents: list[int]
    sums: list[float]
    fates: list[str]
    returned: list[int]
    scores: list[float]
    steps: int
    beam_width: int
