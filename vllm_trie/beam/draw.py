"""Draw a finished search as a trie: as text or as SVG.

Every candidate that the search looked at is a node. Kept nodes were extended, dropped ones were
not, finished ones ended a hypothesis; those that were returned carry their rank and score.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from vllm_trie.beam.trace import NodeFate, SearchTrace
from vllm_trie.tree.draw import visible_text

_MARKS = {NodeFate.KEPT: "", NodeFate.DROPPED: " ✗", NodeFate.FINISHED: " ■"}

_ROW = 22
_CHARACTER = 7.4
_GAP = 30
_MARGIN = 16
_LEGEND = 26

TokenText = Callable[[int], str]
"""From a token id to its text."""


def draw_text(trace: SearchTrace, token_text: TokenText, dropped: bool = True) -> str:
    """The search as lines of text, depth first, likelier siblings first.

    Args:
        trace: The search.
        token_text: Text of a token id; white space is made visible.
        dropped: Whether dropped candidates are drawn.
    """
    children = _children(trace, dropped)
    ranks = _ranks(trace)
    lines = [f"● {trace.steps} steps, beam width {trace.beam_width}"]
    stack = [(node, "", node == children[-1][-1]) for node in reversed(children[-1])]
    while stack:
        node, indent, is_last = stack.pop()
        lines.append(
            f"{indent}{'└─' if is_last else '├─'} {_label(trace, node, token_text, ranks)}"
        )
        below = children[node]
        indent += "   " if is_last else "│  "
        stack.extend((child, indent, child == below[-1]) for child in reversed(below))
    lines.append("■ finished  ✗ dropped  #1 best returned hypothesis, with its score")
    return "\n".join(lines)


def draw_svg(trace: SearchTrace, token_text: TokenText, dropped: bool = True) -> str:
    """The search as one self-contained SVG image, steps from left to right. Text is escaped.

    Arguments as for :func:`draw_text`.
    """
    children = _children(trace, dropped)
    ranks = _ranks(trace)
    depths = _depths(trace)
    nodes = [node for below in children for node in below]
    labels = {node: visible_text(token_text(trace.token_ids[node])) for node in nodes}
    widths = {node: _CHARACTER * len(labels[node]) + 12 for node in nodes}

    columns = [0.0] * (max((depths[node] for node in nodes), default=0) + 1)
    for node in nodes:
        columns[depths[node]] = max(columns[depths[node]], widths[node])
    lefts = [_MARGIN + 10.0]
    for width in columns:
        lefts.append(lefts[-1] + width + _GAP)
    rows = _rows(children)
    middle = _MARGIN + _LEGEND
    y = {node: middle + _ROW * row for node, row in rows.items()}
    width = lefts[-1] + 8 * _CHARACTER + _MARGIN
    height = middle + _ROW * (max(rows.values(), default=0.0) + 1) + _MARGIN
    on_path = _returned_paths(trace)

    edges, boxes = [], []
    for node in nodes:
        parent = trace.parents[node]
        x, node_y = lefts[depths[node]], y[node]
        if parent < 0:
            from_x, from_y = float(_MARGIN), y[children[-1][0]]
        else:
            from_x, from_y = lefts[depths[parent]] + widths[parent], y[parent]
        style = f"{trace.fates[node]}{' returned' if node in on_path else ''}"
        bend = (from_x + x) / 2
        edges.append(
            f'<path class="edge {style}" d="M{from_x:.1f} {from_y:.1f} C{bend:.1f} {from_y:.1f} '
            f'{bend:.1f} {node_y:.1f} {x:.1f} {node_y:.1f}"/>'
        )
        title = escape(f"token {trace.token_ids[node]}, log-probability {trace.sums[node]:.3f}")
        boxes.append(
            f'<g class="node {style}"><title>{title}</title><rect x="{x:.1f}" '
            f'y="{node_y - 8:.1f}" width="{widths[node]:.1f}" height="16" rx="4"/>'
            f'<text x="{x + widths[node] / 2:.1f}" y="{node_y + 4:.1f}" text-anchor="middle">'
            f"{escape(labels[node])}</text>"
        )
        if node in ranks:
            rank, score = ranks[node]
            boxes.append(
                f'<text class="rank" x="{x + widths[node] + 4:.1f}" y="{node_y + 4:.1f}">'
                f"#{rank} {score:.2f}</text>"
            )
        boxes.append("</g>")
    legend = "".join(
        f'<tspan class="{fate}" dx="12">■ {text}</tspan>'
        for fate, text in (("kept", "kept"), ("finished", "finished"), ("dropped", "dropped"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            _STYLE,
            f'<rect class="background" width="{width:.0f}" height="{height:.0f}"/>',
            f'<text x="{_MARGIN}" y="{_MARGIN + 4}">{trace.steps} steps, beam width '
            f"{trace.beam_width}{legend}</text>",
            *edges,
            *boxes,
            "</svg>",
        ]
    )


def _label(
    trace: SearchTrace, node: int, token_text: TokenText, ranks: dict[int, tuple[int, float]]
) -> str:
    text = visible_text(token_text(trace.token_ids[node]))
    label = f"{text} {trace.sums[node]:.2f}{_MARKS[NodeFate(trace.fates[node])]}"
    if node in ranks:
        rank, score = ranks[node]
        label += f"  #{rank} {score:.3f}"
    return label


def _ranks(trace: SearchTrace) -> dict[int, tuple[int, float]]:
    pairs = zip(trace.returned, trace.scores, strict=True)
    return {node: (rank, score) for rank, (node, score) in enumerate(pairs, 1)}


def _returned_paths(trace: SearchTrace) -> set[int]:
    nodes: set[int] = set()
    for node in trace.returned:
        while node >= 0 and node not in nodes:
            nodes.add(node)
            node = trace.parents[node]
    return nodes


def _children(trace: SearchTrace, dropped: bool) -> list[list[int]]:
    """Children of every node, likelier first; those of the root are the last entry."""
    children: list[list[int]] = [[] for _ in range(len(trace.token_ids) + 1)]
    for node, parent in enumerate(trace.parents):
        if dropped or trace.fates[node] != NodeFate.DROPPED:
            children[parent].append(node)
    for below in children:
        below.sort(key=lambda node: -trace.sums[node])
    return children


def _depths(trace: SearchTrace) -> list[int]:
    depths: list[int] = []
    for parent in trace.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _rows(children: list[list[int]]) -> dict[int, float]:
    """Vertical places: a leaf has a row of its own, a parent that of its first child."""
    rows: dict[int, float] = {}
    next_row = 0
    stack = list(reversed(children[-1]))
    order = []
    while stack:
        node = stack.pop()
        order.append(node)
        if not children[node]:
            rows[node] = next_row
            next_row += 1
        stack.extend(reversed(children[node]))
    for node in reversed(order):
        if children[node]:
            rows[node] = rows[children[node][0]]
    return rows


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
