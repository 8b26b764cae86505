"""Draw a finished search as a trie: as text or as SVG.

Every candidate that the search looked at is a node. Kept nodes were extended, dropped ones were
not, finished ones ended a hypothesis; the returned ones carry their rank and score.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_trie.beam.trace import NodeFate, SearchTrace
from vllm_trie.lab.drawings.tree import Node, outline, svg_image, visible_text

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


def draw_svg(trace: SearchTrace, token_text: TokenText, dropped: bool = True) -> str:
    """Return the search as one self-contained SVG image, steps from left to right.

    Arguments as for :func:`draw_text`. Text is escaped.
    """
    legend = "".join(
        f'<tspan class="{fate}" dx="12">■ {fate}</tspan>'
        for fate in ("kept", "finished", "dropped")
    )
    header = f"{trace.steps} steps, beam width {trace.beam_width}{legend}"
    return svg_image(_children(trace, dropped), _nodes(trace, token_text), _STYLE, header)


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
    returned: set[int] = set()  # on the paths of the returned hypotheses
    for node in trace.returned:
        while node >= 0 and node not in returned:
            returned.add(node)
            node = trace.parents[node]
    pairs = zip(trace.returned, trace.scores, strict=True)
    ranks = {node: (rank, score) for rank, (node, score) in enumerate(pairs, 1)}
    nodes = {}
    for node, (token, total, fate) in enumerate(
        zip(trace.token_ids, trace.sums, trace.fates, strict=True)
    ):
        rank, score = ranks.get(node, (0, 0.0))
        nodes[node] = Node(
            visible_text(token_text(token)),
            f" {total:.2f}{_MARKS[NodeFate(fate)]}" + (f"  #{rank} {score:.3f}" if rank else ""),
            f"token {token}, log-probability {total:.3f}",
            f"#{rank} {score:.2f}" if rank else "",
            f"{fate}{' returned' if node in returned else ''}",
        )
    return nodes


_STYLE = """.edge.dropped { stroke: #d0d7de; stroke-dasharray: 3 3 }
.edge.returned { stroke: #1a7f37; stroke-width: 2.4 }
.node rect { fill: #ddf4ff; stroke: #54aeff }
.node.dropped rect { fill: #f6f8fa; stroke: #d0d7de }
.node.dropped text { fill: #8c959f }
.node.finished rect { fill: #dafbe1; stroke: #1a7f37 }
.node.returned rect { stroke-width: 2 }
tspan.kept { fill: #54aeff } tspan.finished { fill: #1a7f37 } tspan.dropped { fill: #afb8c1 }
"""
