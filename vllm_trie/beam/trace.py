"""The whole trie of a finished search, for drawings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class NodeFate(StrEnum):
    """Outcome of the step that looked at a candidate."""

    KEPT = "kept"
    DROPPED = "dropped"
    FINISHED = "finished"


@dataclass(slots=True)
class SearchTrace:
    """Every candidate that a search looked at, as a trie in flat arrays.

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

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    fates: list[str] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    steps: int = 0
    beam_width: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SearchTrace:
        """Return the trace of a dictionary that :meth:`to_dict` made.

        Raises:
            ValueError: The arrays do not describe a trie.
        """
        try:
            trace = cls(**values)
        except TypeError as error:
            raise ValueError(f"not a beam search trace: {error}") from None
        count = len(trace.token_ids)
        if not len(trace.parents) == len(trace.sums) == len(trace.fates) == count:
            raise ValueError(
                "not a beam search trace: token_ids, parents, sums and fates differ in length"
            )
        if any(not -1 <= parent < node for node, parent in enumerate(trace.parents)):
            raise ValueError("not a beam search trace: a parent does not come before its child")
        if any(not 0 <= node < count for node in trace.returned):
            raise ValueError("not a beam search trace: a returned node does not exist")
        return trace
