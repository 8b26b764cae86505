"""Draw a finished search as a trie: as text or as SVG.

Every candidate that the search looked at is a node. Kept nodes were extended, dropped ones were
not, finished ones ended a hypothesis; the returned ones carry their rank and score.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from html import escape

from vllm_trie.beam.trace import NodeFate, SearchTrace
from vllm_trie.tree.draw import outline, place_rows, svg_document, visible_text

_MARKS = {NodeFate.KEPT: "", NodeFate.DROPPED: " ✗", NodeFate.FINISHED: " ■"}

# Sizes in pixels.
_ROW = 22
_CHARACTER = 7.4
_GAP = 30
_MARGIN = 16
_TOP = _MARGIN + 26

TokenText = Callable[[int], str]
"""From a token id to its text."""


def draw_text(trace: SearchTrace, token_text: TokenText, dropped: bool = True) -> str:
    """Return the search as lines of text, depth first, likelier siblings first; white space of
    tokens is made visible, and `dropped` draws dropped candidates too."""
    layout = _Layout(trace, token_text, dropped)
    return "\n".join(
        [
            f"● {trace.steps} steps, beam width {trace.beam_width}",
            *outline(layout.children, layout.line),
            "■ finished  ✗ dropped  #1 best returned hypothesis, with its score",
        ]
    )


def draw_svg(trace: SearchTrace, token_text: TokenText, dropped: bool = True) -> str:
    """Return the search as one self-contained SVG image, steps from left to right.

    Arguments as for :func:`draw_text`. Text is escaped.
    """
    layout = _Layout(trace, token_text, dropped)
    width = layout.columns[-1] + 8 * _CHARACTER + _MARGIN
    height = _TOP + _ROW * (max(layout.rows, default=0.0) + 1) + _MARGIN
    legend = "".join(
        f'<tspan class="{fate}" dx="12">■ {fate}</tspan>'
        for fate in ("kept", "finished", "dropped")
    )
    title = (
        f'<text x="{_MARGIN}" y="{_MARGIN + 4}">{trace.steps} steps, beam width '
        f"{trace.beam_width}{legend}</text>"
    )
    edges = (layout.edge(node) for node in layout.nodes)
    boxes = (layout.box(node) for node in layout.nodes)
    return svg_document(width, height, _STYLE, [title, *edges, *boxes])


class _Layout:
    """Places of a trace's nodes."""

    def __init__(self, trace: SearchTrace, token_text: TokenText, dropped: bool) -> None:
        self.trace = trace
        # Children of every node, likelier first; those of the root are the last entry.
        self.children: list[list[int]] = [[] for _ in range(len(trace.token_ids) + 1)]
        self.depths: list[int] = []
        for node, parent in enumerate(trace.parents):
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
            if dropped or trace.fates[node] != NodeFate.DROPPED:
                self.children[parent].append(node)
        for below in self.children:
            below.sort(key=lambda node: -trace.sums[node])
        self.nodes = [node for below in self.children for node in below]
        self.labels = {node: visible_text(token_text(trace.token_ids[node])) for node in self.nodes}
        self.widths = {node: _CHARACTER * len(self.labels[node]) + 12 for node in self.nodes}
        pairs = zip(trace.returned, trace.scores, strict=True)
        self.ranks = {node: (rank, score) for rank, (node, score) in enumerate(pairs, 1)}

    @cached_property
    def columns(self) -> list[float]:
        """The left edge of each depth, and the right end of the last one."""
        widths = [0.0] * (max((self.depths[node] for node in self.nodes), default=0) + 1)
        for node in self.nodes:
            widths[self.depths[node]] = max(widths[self.depths[node]], self.widths[node])
        lefts = [_MARGIN + 10.0]
        for width in widths:
            lefts.append(lefts[-1] + width + _GAP)
        return lefts

    @cached_property
    def rows(self) -> list[float]:
        """Vertical place of each node: a leaf has its own row, a parent that of its first child."""
        return place_rows(self.children, lambda below: below[0])

    @cached_property
    def returned(self) -> set[int]:
        """Nodes on the paths of the returned hypotheses."""
        nodes: set[int] = set()
        for node in self.trace.returned:
            while node >= 0 and node not in nodes:
                nodes.add(node)
                node = self.trace.parents[node]
        return nodes

    def line(self, node: int) -> str:
        """Return a node's line of text."""
        trace = self.trace
        line = f"{self.labels[node]} {trace.sums[node]:.2f}{_MARKS[NodeFate(trace.fates[node])]}"
        if node in self.ranks:
            rank, score = self.ranks[node]
            line += f"  #{rank} {score:.3f}"
        return line

    def place(self, node: int) -> tuple[float, float]:
        """Return the left end and the middle height of a node's box."""
        return self.columns[self.depths[node]], _TOP + _ROW * self.rows[node]

    def style(self, node: int) -> str:
        """Return the CSS classes of a node and of the edge that leads to it."""
        return f"{self.trace.fates[node]}{' returned' if node in self.returned else ''}"

    def edge(self, node: int) -> str:
        parent = self.trace.parents[node]
        x, y = self.place(node)
        if parent < 0:
            from_x, from_y = float(_MARGIN), self.place(self.children[-1][0])[1]
        else:
            from_x, from_y = self.place(parent)
            from_x += self.widths[parent]
        bend = (from_x + x) / 2
        return (
            f'<path class="edge {self.style(node)}" d="M{from_x:.1f} {from_y:.1f} '
            f'C{bend:.1f} {from_y:.1f} {bend:.1f} {y:.1f} {x:.1f} {y:.1f}"/>'
        )

    def box(self, node: int) -> str:
        trace, width = self.trace, self.widths[node]
        x, y = self.place(node)
        title = f"token {trace.token_ids[node]}, log-probability {trace.sums[node]:.3f}"
        rank = ""
        if node in self.ranks:
            number, score = self.ranks[node]
            rank = (
                f'\n<text class="rank" x="{x + width + 4:.1f}" y="{y + 4:.1f}">'
                f"#{number} {score:.2f}</text>"
            )
        return (
            f'<g class="node {self.style(node)}"><title>{escape(title)}</title><rect x="{x:.1f}" '
            f'y="{y - 8:.1f}" width="{width:.1f}" height="16" rx="4"/>'
            f'<text x="{x + width / 2:.1f}" y="{y + 4:.1f}" text-anchor="middle">'
            f"{escape(self.labels[node])}</text>{rank}\n</g>"
        )


_STYLE = """<style>
text { font: 12px ui-monospace, SFMono-Regular, Menlo, monospace; fill: #24292f }
.background { fill: #ffffff }
.edge { fill: none; stroke: #8c959f; stroke-width: 1.2 }
.edge.dropped { stroke: #d0d7de; stroke-dasharray: 3 3 }
.edge.returned { stroke: #1a7f37; stroke-width: 2.4 }
.node rect { fill: #ddf4ff; stroke: #54aeff }
.node.dropped rect { fill: #f6f8fa; stroke: #d0d7de }
.node.dropped text { fill: #8c959f }
.node.finished rect { fill: #dafbe1; stroke: #1a7f37 }
.node.returned rect { stroke-width: 2 }
.rank { font-weight: bold }
tspan.kept { fill: #54aeff } tspan.finished { fill: #1a7f37 } tspan.dropped { fill: #afb8c1 }
</style>"""
