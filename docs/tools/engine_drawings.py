"""Drawings of what happens inside the engine: a step's path, and beams that share KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from docs.tools.svg import Canvas, Point

_BLOCK_SIZE = 4
_SLOT = 30


class _Block(NamedTuple):
    """A KV block as drawn."""

    number: int
    tokens: str
    """One letter a token, `.` for a free slot; capitals are the prompt."""
    holders: int
    style: str = "soft"


def _draw_block(canvas: Canvas, x: float, y: float, block: _Block) -> None:
    for slot in range(_BLOCK_SIZE):
        token = block.tokens[slot]
        style = "none dashed" if token == "." else block.style
        canvas.box(x + _SLOT * slot, y, _SLOT - 2, 26, style)
        if token != ".":
            canvas.text(x + _SLOT * slot + 14, y + 18, token, "token", "middle")
    canvas.text(x, y - 5, f"block {block.number}", "small")
    canvas.text(
        x + _SLOT * _BLOCK_SIZE - 2, y - 5, f"× {block.holders}" if block.holders else "free",
        "small " + ("dim" if block.holders == 1 else "amber" if block.holders else "red"), "end",
    )  # fmt: skip


class _Panel(NamedTuple):
    title: str
    text: Sequence[str]
    blocks: Sequence[tuple[int, float, _Block]]
    """Column, row, block."""
    rows: Sequence[tuple[float, str]]
    edges: Sequence[tuple[int, float, int, float, str]]


_PROMPT = _Block(1, "ABCD", 1)

_PANELS = (
    _Panel(
        "1  Prefill",
        ["The prompt A B C D E F is computed once.",
         "One full block, one tail block."],
        [(0, 0, _PROMPT), (1, 0, _Block(2, "EF..", 1))],
        [(0, "beam 0")],
        [(0, 0, 1, 0, "edge")],
    ),
    _Panel(
        "2  The first fork",
        ["The best two continuations are x and y. The worker",
         "has appended x already: it stays in beam 0, at no cost.",
         "Beam 1 takes the full block by reference and a copy",
         "of the tail, then its own token y."],
        [(0, 0.5, _PROMPT._replace(holders=2, style="blue")),
         (1, 0, _Block(2, "EFx.", 1)),
         (1, 1, _Block(3, "EFy.", 1, "amber"))],
        [(0, "beam 0"), (1, "beam 1")],
        [(0, 0.5, 1, 0, "edge"), (0, 0.5, 1, 1, "edge-amber")],
    ),
    _Panel(
        "3  Each beam writes its own tail",
        ["No copy: a beam that shares its tail with no other",
         "writes in place. Full tails are followed by new blocks."],
        [(0, 0.5, _PROMPT._replace(holders=2, style="blue")),
         (1, 0, _Block(2, "EFxa", 1)), (2, 0, _Block(4, "b...", 1)),
         (1, 1, _Block(3, "EFyc", 1)), (2, 1, _Block(5, "d...", 1))],
        [(0, "beam 0"), (1, "beam 1")],
        [(0, 0.5, 1, 0, "edge"), (0, 0.5, 1, 1, "edge"),
         (1, 0, 2, 0, "edge"), (1, 1, 2, 1, "edge")],
    ),
    _Panel(
        "4  One beam ends, the other forks",
        ["Both best continuations come from beam 1. Beam 0 gives",
         "blocks 2 and 4 back at once. The new beam 2 shares",
         "blocks 1 and 3 and copies the tail."],
        [(0, 1, _PROMPT._replace(holders=2, style="blue")),
         (1, 0, _Block(2, "EFxa", 0, "red")), (2, 0, _Block(4, "b...", 0, "red")),
         (1, 1, _Block(3, "EFyc", 2, "blue")), (2, 1, _Block(5, "de..", 1)),
         (2, 2, _Block(6, "df..", 1, "amber"))],
        [(1, "beam 1"), (2, "beam 2")],
        [(0, 1, 1, 1, "edge"), (1, 1, 2, 1, "edge"), (1, 1, 2, 2, "edge-amber")],
    ),
)  # fmt: skip


def blocks() -> str:
    """How the hypotheses of a beam search share KV blocks, in four moments."""
    canvas = Canvas(820, 635, "Beams that share KV blocks, with copy-on-write")
    left, column, row = 345, 143, 52

    def place(at: float, line: float, top: float) -> Point:
        return Point(left + column * at, top + row * line)

    top = 50.0
    for panel in _PANELS:
        height = row * max(line for _, line, _ in panel.blocks) + 26
        canvas.text(20, top - 8, panel.title, "title")
        canvas.lines(20, top + 14, panel.text, "small dim")
        for start, line, end, below, style in panel.edges:
            a, b = place(start, line, top), place(end, below, top)
            canvas.edge(Point(a.x + _SLOT * _BLOCK_SIZE, a.y + 13), Point(b.x, b.y + 13), style)
        for at, line, block in panel.blocks:
            _draw_block(canvas, *place(at, line, top), block)
        for line, name in panel.rows:
            last = max(at for at, below, _ in panel.blocks if below == line)
            canvas.text(
                place(last + 1, 0, top).x - 18, top + row * line + 18, name, "small token", "start"
            )
        top += max(height, 17.0 * len(panel.text)) + 66
        if panel is not _PANELS[-1]:
            canvas.box(20, top - 42, 780, 0.6, "none", 0)
    canvas.text(20, 619, "× n: beams that hold the block.", "small dim")
    canvas.text(215, 619, "amber: copied in this step", "small amber")
    canvas.text(400, 619, "blue: shared", "small blue")
    canvas.text(500, 619, "red: given back", "small red")
    return canvas.render()


def path() -> str:
    """Where the plugin's parts sit in a step of vLLM."""
    canvas = Canvas(820, 330, "Where the plugin sits in a step of vLLM")
    canvas.text(20, 30, "Front end", "title")
    canvas.text(300, 30, "Engine core", "title")
    canvas.text(590, 30, "Worker", "title")

    def part(x: float, y: float, width: float, lines: Sequence[str], style: str) -> None:
        canvas.box(x, y, width, 20 + 17 * len(lines), style)
        canvas.text(x + width / 2, y + 22, lines[0], "", "middle")
        canvas.lines(x + width / 2, y + 38, lines[1:], "small dim", "middle")

    part(20, 50, 190, ["arguments", "method → custom_class"], "green")
    part(20, 130, 190, ["requests", "options checked"], "green")
    part(20, 210, 190, ["outputs, metrics", "vllm:trie_*"], "green")
    part(300, 50, 210, ["scheduler", "a flat list of draft tokens"], "soft")
    part(300, 130, 210, ["beam groups", "fork, drop, share blocks"], "green")
    part(300, 210, 210, ["KV block pool", "references, copy-on-write"], "soft")
    part(590, 50, 210, ["inputs", "position follows the depth"], "green")
    part(590, 112, 210, ["model", "stock code"], "soft")
    part(590, 174, 210, ["attention", "ancestor mask"], "green")
    part(590, 236, 210, ["walk, move KV, draft", "vLLM’s own sampler"], "green")
    canvas.arrow(Point(210, 150), Point(296, 80))
    canvas.arrow(Point(510, 78), Point(586, 78))
    canvas.arrow(Point(405, 108), Point(405, 126))
    canvas.arrow(Point(405, 188), Point(405, 206))
    for y in (107, 169, 231):
        canvas.arrow(Point(695, y), Point(695, y + 5))
    canvas.arrow(Point(586, 262), Point(514, 100), "edge-green")
    canvas.text(528, 300, "sampled tokens, next tree", "small green", "end")
    canvas.arrow(Point(296, 165), Point(214, 235))
    canvas.text(20, 318, "green: the plugin’s", "small green")
    canvas.text(140, 318, "grey: stock vLLM", "small dim")
    return canvas.render()
