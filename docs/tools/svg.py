"""A small SVG canvas whose drawings can be read on light and on dark pages.

A drawing brings its own background. Both change with the reader's colour scheme through one media
query, so they fit each other on every page, also where the page has another scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_LIGHT = {
    "page": "#ffffff", "ink": "#1f2430", "dim": "#667085", "line": "#98a2b3", "soft": "#f2f4f7",
    "blue": "#e0e7ff", "blue-line": "#4f5fd0", "green": "#d5f2df", "green-line": "#22834a",
    "amber": "#fdebd2", "amber-line": "#9a5509", "red": "#fbe1df", "red-line": "#b42318",
}  # fmt: skip
_DARK = {
    "page": "#1b1e27", "ink": "#e8eaf0", "dim": "#a0a8b8", "line": "#667085", "soft": "#262a36",
    "blue": "#2a3263", "blue-line": "#98a4ff", "green": "#1c4430", "green-line": "#63d394",
    "amber": "#4d3614", "amber-line": "#f0b45a", "red": "#53231f", "red-line": "#ff9c92",
}  # fmt: skip

_RULES = """\
text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
.small { font-size: 11px; } .title { font-weight: 600; font-size: 14px; }
.token { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.dim { fill: var(--dim); } .page { fill: var(--page); stroke: var(--line); }
.edge { fill: none; stroke: var(--line); stroke-width: 1.5; }
.edge-green { fill: none; stroke: var(--green-line); stroke-width: 2.5; }
.edge-amber { fill: none; stroke: var(--amber-line); stroke-width: 2; }
.grid { fill: none; stroke: var(--line); stroke-width: 0.5; }
.dashed { stroke-dasharray: 4 3; }
.soft { fill: var(--soft); stroke: var(--line); }
.blue { fill: var(--blue); stroke: var(--blue-line); }
.green { fill: var(--green); stroke: var(--green-line); }
.amber { fill: var(--amber); stroke: var(--amber-line); }
.red { fill: var(--red); stroke: var(--red-line); }
.none { fill: none; stroke: var(--line); }
text.green { fill: var(--green-line); stroke: none; }
text.amber { fill: var(--amber-line); stroke: none; }
text.red { fill: var(--red-line); stroke: none; }
text.blue { fill: var(--blue-line); stroke: none; }
"""


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colors.items())


class Point(NamedTuple):
    """A place on the canvas, in pixels from the top left."""

    x: float
    y: float


class Canvas:
    """Collects shapes in drawing order; :meth:`render` returns the file's text.

    Args:
        width, height: pixels.
        title: what the drawing shows, for readers who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, style: str = "soft", radius: int = 4
    ) -> None:
        """A rectangle; `style` is one of the classes above, several separated by spaces."""
        self._parts.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius}"/>'
        )

    def text(
        self, x: float, y: float, content: str, style: str = "", anchor: str = "start"
    ) -> None:
        """One line of text; `y` is its baseline, `anchor` "start", "middle" or "end"."""
        self._parts.append(
            f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
            f"{escape(content, quote=False)}</text>"
        )

    def lines(
        self, x: float, y: float, content: Sequence[str], style: str = "", anchor: str = "start"
    ) -> None:
        """Lines of text, 17 pixels apart."""
        for number, line in enumerate(content):
            self.text(x, y + 17 * number, line, style, anchor)

    def token(
        self, x: float, y: float, content: str, style: str = "soft", width: float = 44
    ) -> None:
        """A token in its box, 26 pixels high."""
        self.box(x, y, width, 26, style)
        if content:
            self.text(x + width / 2, y + 17, content, "token", "middle")

    def edge(self, start: Point, end: Point, style: str = "edge") -> None:
        """A curve from left to right."""
        middle = (start.x + end.x) / 2
        self._parts.append(
            f'<path class="{style}" d="M{start.x:g} {start.y:g} C{middle:g} {start.y:g} '
            f'{middle:g} {end.y:g} {end.x:g} {end.y:g}"/>'
        )

    def line(self, points: Sequence[Point], style: str = "edge") -> None:
        """Straight lines from point to point."""
        path = " L".join(f"{point.x:.1f} {point.y:.1f}" for point in points)
        self._parts.append(f'<path class="{style}" d="M{path}"/>')

    def arrow(self, start: Point, end: Point, style: str = "edge") -> None:
        """A straight arrow."""
        length = max(((end.x - start.x) ** 2 + (end.y - start.y) ** 2) ** 0.5, 1e-9)
        along = Point((end.x - start.x) / length, (end.y - start.y) / length)
        wings = [
            Point(end.x - 7 * along.x + s * 4 * along.y, end.y - 7 * along.y - s * 4 * along.x)
            for s in (1, -1)
        ]
        self._parts.append(
            f'<path class="{style}" d="M{start.x:g} {start.y:g} L{end.x:g} {end.y:g} '
            f"M{wings[0].x:.1f} {wings[0].y:.1f} L{end.x:g} {end.y:g} "
            f'L{wings[1].x:.1f} {wings[1].y:.1f}"/>'
        )

    def render(self) -> str:
        """The SVG file."""
        width, height = self._size
        style = f":root {{ {_variables(_LIGHT)} }}\n"
        style += f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}\n"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>\n{style}{_RULES}</style>",
                f'<rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" '
                'rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )
