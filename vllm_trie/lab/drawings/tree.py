"""Draw a trie as text or as SVG: a token tree here, a search in `drawings.beam`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import NamedTuple
from unicodedata import combining, east_asian_width

from vllm_trie.tree.token_tree import TokenTree

# SVG measures in pixels.
_ROW = 26
_COLUMN_GAP = 56
_LABEL_ROOM = 30  # an edge leaves its box straight for this long, below the note
_CHAR = 7.8
_MARGIN = 16
_BOX = 20

_VISIBLE = {" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible_text(text: str) -> str:
    """Return `text` with white space and control characters made visible, never empty."""
    shown = (
        _VISIBLE.get(char) or (char if char.isprintable() else f"\\u{{{ord(char):x}}}")
        for char in text
    )
    return "".join(shown) or "∅"


class Node(NamedTuple):
    """A node as it is drawn."""

    label: str
    """Visible text."""
    suffix: str = ""
    """Behind the label in text."""
    title: str = ""
    """Shown by SVG when the pointer rests on the node."""
    note: str = ""
    """Small text behind the box in SVG."""
    style: str = ""
    """CSS classes of the node and of the edge that leads to it."""


Children = Sequence[Sequence[int]]
"""Of each node, with larger indices than its own; the last entry has those of the root."""


def draw_text(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int] = ()
) -> str:
    """Draw the tree as lines of text, one node a line in depth-first order.

    Siblings appear in index order; `accepted` are indices of nodes to mark with `✓`.
    """
    return "\n".join(["●", *outline(tree.children(), _nodes(tree, token_text, accepted))])


def draw_svg(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int] = ()
) -> str:
    """Draw the tree as a self-contained SVG image: depth from left to right, accepted path marked.

    Arguments as for `draw_text`. All text is escaped.
    """
    return svg_image(tree.children(), _nodes(tree, token_text, accepted), _STYLE)


def _nodes(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int]
) -> dict[int, Node]:
    accepted, nodes = set(accepted), {}
    for node, token in enumerate(tree.token_ids.tolist()):
        note, facts = "", []
        if tree.probabilities is not None:
            facts.append(note := _percent(tree.probabilities[node]))
        if tree.never_accept is not None and tree.never_accept[node]:
            facts.append("never accepted")
        suffix = f"  ({', '.join(facts)})" if facts else ""
        nodes[node] = Node(
            visible_text(token_text(token)),
            f"{suffix}{' ✓' if node in accepted else ''}",
            f"node {node}, token {token}{suffix}",
            note,
            "accepted" if node in accepted else "",
        )
    return nodes


def outline(children: Children, nodes: Mapping[int, Node]) -> list[str]:
    """Return a line for each node, depth first."""
    lines = []
    stack = [(node, "", node == children[-1][-1]) for node in reversed(children[-1])]
    while stack:
        node, indent, is_last = stack.pop()
        lines.append(f"{indent}{'└─' if is_last else '├─'} {nodes[node].label}{nodes[node].suffix}")
        indent += "   " if is_last else "│  "
        below = children[node]
        stack.extend((child, indent, child == below[-1]) for child in reversed(below))
    return lines


def svg_image(children: Children, nodes: Mapping[int, Node], colors: str, header: str = "") -> str:
    """Return a self-contained SVG image of a trie, its depths from left to right.

    Args:
        children, nodes: Of the trie. Text is escaped.
        colors: CSS for the classes of the nodes.
        header: SVG text of the line above the trie.
    """
    depths, rows = _depths(children), _rows(children)
    widths = {node: _CHAR * _num_cells(nodes[node].label) + 14 for node in depths}
    column_x = _columns(depths, widths)
    top = _MARGIN + (_ROW if header else 0)
    y = {node: top + _ROW * (rows[node] + 0.5) for node in depths}
    height = top + _MARGIN + _ROW * max(1, sum(not children[node] for node in depths))
    notes = max((len(nodes[node].note) for node in depths), default=0)
    width = column_x[-1] - _COLUMN_GAP + max(_LABEL_ROOM, notes * _CHAR) + _MARGIN
    roots = children[-1]
    root_y = (y[roots[0]] + y[roots[-1]]) / 2 if roots else height / 2
    edges, boxes = [], []
    for parent, below in zip((*range(len(children) - 1), -1), children, strict=True):
        for node in below:
            x = column_x[depths[node]]
            if parent < 0:
                from_x, from_y, straight_x = column_x[0] + 5, root_y, column_x[0] + 5
            else:
                from_x, from_y = column_x[depths[parent]] + widths[parent], y[parent]
                straight_x = from_x + _LABEL_ROOM
            bend = (straight_x + x) / 2
            style = f" {nodes[node].style}".rstrip()
            edges.append(
                f'<path class="edge{style}" d="M{from_x:.1f} {from_y:.1f} H{straight_x:.1f} '
                f'C{bend:.1f} {from_y:.1f} {bend:.1f} {y[node]:.1f} {x:.1f} {y[node]:.1f}"/>'
            )
            boxes.append(_box(nodes[node], style, x, y[node], widths[node]))
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{_COMMON_STYLE}{colors}</style>",
            f'<rect class="background" {size}/>',
            *([f'<text x="{_MARGIN}" y="{_MARGIN + 4}">{header}</text>'] if header else []),
            *edges,
            f'<circle class="root" cx="{column_x[0]:.1f}" cy="{root_y:.1f}" r="5"/>',
            *boxes,
            "</svg>",
        ]
    )


def _depths(children: Children) -> dict[int, int]:
    """Return the depth of each node, from 1, in ascending order of the nodes."""
    depths: dict[int, int] = {}
    stack = [(node, 1) for node in children[-1]]
    while stack:
        node, depth = stack.pop()
        depths[node] = depth
        stack += ((child, depth + 1) for child in children[node])
    return dict(sorted(depths.items()))


def _rows(children: Children) -> list[float]:
    """Return the row of each node: a leaf has its own, a parent the middle of its children's."""
    rows = [0.0] * (len(children) - 1)
    next_row = 0
    stack = list(reversed(children[-1]))
    while stack:
        node = stack.pop()
        if not children[node]:
            rows[node] = next_row
            next_row += 1
        stack.extend(reversed(children[node]))
    # Children have larger indices than their parent, so backwards they are placed first.
    for node in range(len(rows) - 1, -1, -1):
        if below := children[node]:
            rows[node] = (rows[below[0]] + rows[below[-1]]) / 2
    return rows


def _columns(depths: Mapping[int, int], widths: Mapping[int, float]) -> list[float]:
    """Return the left edge of each depth's boxes, and of one more column."""
    column_width = [0.0] * (max(depths.values(), default=0) + 1)
    column_width[0] = _BOX / 2
    for node, depth in depths.items():
        column_width[depth] = max(column_width[depth], widths[node])
    column_x = [float(_MARGIN)]
    for width in column_width:
        column_x.append(column_x[-1] + width + _COLUMN_GAP)
    return [column_x[0], *(x - _LABEL_ROOM / 2 for x in column_x[1:])]  # the root has no label


def _box(node: Node, style: str, x: float, y: float, width: float) -> str:
    note = (
        f'<text class="note" x="{x + width + 3:.1f}" y="{y - 3:.1f}">{escape(node.note)}</text>'
        if node.note
        else ""
    )
    return (
        f'<g class="node{style}"><title>{escape(node.title)}</title>'
        f'<rect x="{x:.1f}" y="{y - _BOX / 2:.1f}" width="{width:.1f}" height="{_BOX}" rx="4"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 4.5:.1f}" '
        f'text-anchor="middle">{escape(node.label)}</text>{note}</g>'
    )


_COMMON_STYLE = """
.background { fill: #ffffff }
.edge { fill: none; stroke: #9aa5b1; stroke-width: 1.2 }
.root { fill: #57606a }
.node rect { fill: #f6f8fa; stroke: #9aa5b1 }
text { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; fill: #1f2328 }
text.note { font-size: 9px; fill: #6e7781 }
"""
_STYLE = """.edge.accepted { stroke: #1a7f37; stroke-width: 2.6 }
.node.accepted rect { fill: #dafbe1; stroke: #1a7f37; stroke-width: 1.8 }
"""


def _num_cells(text: str) -> int:
    """Return the width of a text in character cells of a monospaced font."""
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def _percent(probability: float) -> str:
    return f"{100 * float(probability):.2g}%" if probability < 0.1 else f"{100 * probability:.0f}%"
