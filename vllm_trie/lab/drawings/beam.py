"""Draw a finished search as a trie.

Every candidate that the search looked at is a node. Kept nodes were extended, dropped ones were
not, finished ones ended a hypothesis; the returned ones carry their rank and score.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_trie.lab.drawings.tree import Node, outline, visible_text
from vllm_trie.searches.trace import NodeFate, SearchTrace

_MARKS = {NodeFate.KEPT: "", NodeFate.DROPPED: " ✗", NodeFate.FINISHED: " ■"}

TokenText = Callable[[int], str]
"""From a token id to its text."""


def draw_text(trace: SearchTrace, token_text: TokenText, dropped: bool = True) -> str:
    """Return the search as lines of text, depth first, likelier siblings first; white space of
    tokens is made visible, and `dropped` draws dropped candidates too."""
    return "\n".join(
        [
            f"● {trace.steps} steps, beam width {trace.beam_width}",
            *outline(_children(trace, dropped), _nodes(trace, token_text)),
            "■ finished  ✗ dropped  #1 best returned hypothesis, with its score",
        ]
    )


def _children(trace: SearchTrace, dropped: bool) -> list[list[int]]:
    """Return the children of every node, likelier first; those of the root are the last entry."""
    children: list[list[int]] = [[] for _ in range(len(trace.token_ids) + 1)]
    for node, parent in enumerate(trace.parents):
        if dropped or trace.fates[node] != NodeFate.DROPPED:
            children[parent].append(node)
    for below in children:
        below.sort(key=lambda node: -trace.sums[node])
    return children


def _nodes(trace: SearchTrace, token_text: TokenText) -> dict[int, Node]:
    pairs = zip(trace.returned, trace.scores, strict=True)
    ranks = {node: f"  #{rank} {score:.3f}" for rank, (node, score) in enumerate(pairs, 1)}
    columns = zip(trace.token_ids, trace.sums, trace.fates, strict=True)
    return {
        node: Node(
            visible_text(token_text(token)),
            f" {total:.2f}{_MARKS[NodeFate(fate)]}{ranks.get(node, '')}",
        )
        for node, (token, total, fate) in enumerate(columns)
    }
