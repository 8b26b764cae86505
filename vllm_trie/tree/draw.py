"""Draw a token tree as text or as SVG."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from html import escape
from unicodedata import combining, east_asian_width

from vllm_trie.tree.token_tree import TokenTree

# SVG measures in pixels.
_ROW = 26
_COLUMN_GAP = 56
_LABEL_ROOM = 30  # an edge leaves its box straight for this long, below the probability
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


def draw_text(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int] = ()
) -> str:
    """Draw the tree as lines of text, one node a line in depth-first order.

    Siblings appear in index order; `accepted` are indices of nodes to mark with `✓`.
    """
    accepted = set(accepted)

    def label(node: int) -> str:
        text = visible_text(token_text(int(tree.token_ids[node])))
        return f"{text}{_suffix(tree, node)}{' ✓' if node in accepted else ''}"

    return "\n".join(["●", *outline(tree.children(), label)])


def outline(children: Sequence[Sequence[int]], label: Callable[[int], str]) -> Iterator[str]:
    """Yield a line for each node, depth first; the last of `children` are the root's."""
    stack = [(node, "", node == children[-1][-1]) for node in reversed(children[-1])]
    while stack:
        node, indent, is_last = stack.pop()
        yield f"{indent}{'└─' if is_last else '├─'} {label(node)}"
        indent += "   " if is_last else "│  "
        below = children[node]
        stack.extend((child, indent, child == below[-1]) for child in reversed(below))


def place_rows(
    children: Sequence[Sequence[int]], of_parent: Callable[[list[float]], float]
) -> list[float]:
    """Return the row of each node: a leaf has its own, from 0, and `of_parent` returns a parent's
    from those of its children."""
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
        if children[node]:
            rows[node] = of_parent([rows[child] for child in children[node]])
    return rows


def svg_document(width: float, height: float, style: str, drawn: Iterable[str]) -> str:
    """Return an SVG image of this size in pixels, with a background."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            style,
            f'<rect class="background" {size}/>',
            *drawn,
            "</svg>",
        ]
    )


def draw_svg(
    tree: TokenTree, token_text: Callable[[int], str], accepted: Collection[int] = ()
) -> str:
    """Draw the tree as a self-contained SVG image: depth from left to right, accepted path marked.

    Arguments as for `draw_text`. All text is escaped.
    """
    accepted = set(accepted)
    children = tree.children()
    depths = tree.depths().tolist()
    labels = [visible_text(token_text(int(token))) for token in tree.token_ids]
    widths = [_CHAR * _num_cells(label) + 14 for label in labels]
    column_x = _columns(depths, widths)
    rows = place_rows(children, lambda below: (below[0] + below[-1]) / 2)
    y = [_MARGIN + _ROW * (row + 0.5) for row in rows]
    height = 2 * _MARGIN + _ROW * max(1, sum(not below for below in children[:-1]))
    width = column_x[-1] - _COLUMN_GAP + _LABEL_ROOM + _MARGIN
    root_y = (y[children[-1][0]] + y[children[-1][-1]]) / 2 if children[-1] else height / 2

    edges, boxes = [], []
    for node, parent in enumerate(tree.parents.tolist()):
        x = column_x[depths[node]]
        if parent < 0:
            from_x, from_y, straight_x = column_x[0] + 5, root_y, column_x[0] + 5
        else:
            from_x, from_y = column_x[depths[parent]] + widths[parent], y[parent]
            straight_x = from_x + _LABEL_ROOM
        marked = " accepted" if node in accepted else ""
        bend = (straight_x + x) / 2
        edges.append(
            f'<path class="edge{marked}" d="M{from_x:.1f} {from_y:.1f} H{straight_x:.1f} '
            f'C{bend:.1f} {from_y:.1f} {bend:.1f} {y[node]:.1f} {x:.1f} {y[node]:.1f}"/>'
        )
        boxes += _box(tree, node, labels[node], x, y[node], widths[node], marked)
    root = f'<circle class="root" cx="{column_x[0]:.1f}" cy="{root_y:.1f}" r="5"/>'
    return svg_document(width, height, _STYLE, [*edges, root, *boxes])


def _columns(depths: list[int], widths: list[float]) -> list[float]:
    """Return the left edge of each depth's boxes, and of one more column."""
    column_width = [0.0] * (max(depths, default=0) + 1)
    column_width[0] = _BOX / 2
    for depth, width in zip(depths, widths, strict=True):
        column_width[depth] = max(column_width[depth], width)
    column_x = [float(_MARGIN)]
    for width in column_width:
        column_x.append(column_x[-1] + width + _COLUMN_GAP)
    return [column_x[0], *(x - _LABEL_ROOM / 2 for x in column_x[1:])]  # the root has no label


def _box(
    tree: TokenTree, node: int, label: str, x: float, y: float, width: float, marked: str
) -> list[str]:
    title = escape(f"node {node}, token {int(tree.token_ids[node])}{_suffix(tree, node)}")
    box = [
        f'<g class="node{marked}"><title>{title}</title>'
        f'<rect x="{x:.1f}" y="{y - _BOX / 2:.1f}" width="{width:.1f}" height="{_BOX}" rx="4"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 4.5:.1f}" '
        f'text-anchor="middle">{escape(label)}</text>'
    ]
    if tree.probabilities is not None:
        box.append(
            f'<text class="probability" x="{x + width + 3:.1f}" '
            f'y="{y - 3:.1f}">{_percent(tree.probabilities[node])}</text>'
        )
    return [*box, "</g>"]


_STYLE = """<style>
.background { fill: #ffffff }
.edge { fill: none; stroke: #9aa5b1; stroke-width: 1.2 }
.edge.accepted { stroke: #1a7f37; stroke-width: 2.6 }
.root { fill: #57606a }
.node rect { fill: #f6f8fa; stroke: #9aa5b1 }
.node.accepted rect { fill: #dafbe1; stroke: #1a7f37; stroke-width: 1.8 }
text { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; fill: #1f2328 }
text.probability { font-size: 9px; fill: #6e7781 }
</style>"""


def _num_cells(text: str) -> int:
    """Return the width of a text in character cells of a monospaced font."""
    return sum(
        0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text
    )


def _suffix(tree: TokenTree, node: int) -> str:
    parts = []
    if tree.probabilities is not None:
        parts.append(_percent(tree.probabilities[node]))
    if tree.never_accept is not None and tree.never_accept[node]:
        parts.append("never accepted")
    return f"  ({', '.join(parts)})" if parts else ""


def _percent(probability: float) -> str:
    return f"{100 * float(probability):.2g}%" if probability < 0.1 else f"{100 * probability:.0f}%"
