"""Charts of tables in the pages, so that a chart and its table cannot differ."""

from __future__ import annotations

import math
import re
from pathlib import Path

from docs.tools.svg import Canvas, Point

DOCS = Path(__file__).resolve().parents[1]
_STYLES = (("edge-green", "green"), ("edge-amber", "amber"), ("edge dashed", "dim"))
"""Of the lines and of their names, in the order of the series."""

_WIDTH, _HEIGHT = 340, 180
_LEFT, _TOP = 50, 62


def chats() -> str:
    """Return the bars of speed by category, from the README's table."""
    header, values = _table("../README.md", "decoding over plain vLLM")
    series = {
        "vLLM's ngram, 8 tokens": values["bfloat16: vLLM's `ngram`, 8 tokens"],
        "vLLM's suffix": values["vLLM's `suffix`"],
        "ngram_trie": values["`ngram_trie`"],
    }
    canvas = Canvas(860, 250, "Decoding speed over plain vLLM by category")
    title = "Decoding speed over plain vLLM, SmolLM2-135M-Instruct, bfloat16, 2 CPU cores"
    canvas.text(16, 24, title, "title")
    bottom, high = 222, 4.7

    def height(value: float) -> float:
        return 160 * value / high

    for value in range(5):
        y = bottom - height(value)
        canvas.line([Point(_LEFT, y), Point(850, y)], "grid")
        canvas.text(_LEFT - 8, y + 4, f"{value}", "small dim", "end")
    start = 16.0
    wide = (850 - _LEFT) / len(header)
    for number, (style, (name, speeds)) in enumerate(
        zip(("amber", "soft", "green"), series.items(), strict=True)
    ):
        canvas.box(start, 36, 12, 10, style, radius=2)
        canvas.text(start + 18, 45, name, "small")
        start += 40 + 6.2 * len(name)
        for place, value in enumerate(speeds):
            left = _LEFT + wide * (place + 0.1 + 0.27 * number)
            y = bottom - height(value)
            canvas.box(left, y, 0.25 * wide, height(value), style, radius=2)
            canvas.text(left + 0.125 * wide, y - 5, f"{value:.2f}", "small", "middle")
    for place, name in enumerate(header):
        canvas.text(_LEFT + wide * (place + 0.5), bottom + 18, name, "small", "middle")
    return canvas.render()


def load() -> str:
    """Return the chart of speed over the number of requests."""
    rows = {"`ngram_trie`, trees": "ngram_trie", "vLLM's `suffix`": "suffix"}
    ngram = {"vLLM's `ngram`, 8 tokens, n-grams of 1 to 5": "ngram"}
    canvas = Canvas(860, 290, "Speed over plain vLLM by the number of concurrent requests")
    panels = ("text that reuses its context", "text without repetition")
    for number, panel in enumerate(panels):
        header, values = _table("../benchmarks/engine.md", f"{panel}, concurrent requests")
        series = {name: values[row] for row, name in (rows | ngram).items()}
        title = f"Speed over plain vLLM: {panel}"
        _draw(canvas, 425 * number, title, header, series, 0.0, 3.75 if number == 0 else 1.25)
    canvas.text(430, 278, "concurrent requests", "small dim", "middle")
    return canvas.render()


def nodes() -> str:
    """Return the chart of tokens per step over the node budget."""
    rows = {
        "`ngram_trie_store`": "ngram_trie with store",
        "`ngram_trie`": "ngram_trie",
        "`vllm_ngram`": "vLLM's ngram",
    }
    header, values = _table("../benchmarks/drafters.md", "mean, by nodes")
    canvas = Canvas(500, 290, "Tokens per step by the node budget")
    series = {name: values[row] for row, name in rows.items()}
    _draw(canvas, 0, "Tokens per step on recorded answers", header, series, 1.0, 3.0)
    canvas.text(_LEFT + _WIDTH / 2, 278, "nodes", "small dim", "middle")
    return canvas.render()


def beams() -> str:
    """Return the chart of the time of beam searches over their width."""
    header, values = _table(
        "../benchmarks/engine.md", "one search, prompt of 200, 4 tokens, by width"
    )
    series = {
        "native": [1.0] * len(header),
        "vLLM's own": values["vLLM's own, times as long"],
        "Hugging Face": values["Hugging Face, times as long"],
    }
    canvas = Canvas(500, 290, "Time of a beam search over the native one's, by width")
    _draw(canvas, 0, "Time over the native search's", header, series, 0.0, 100.0)
    canvas.text(_LEFT + _WIDTH / 2, 278, "width", "small dim", "middle")
    return canvas.render()


def _table(page: str, title: str) -> tuple[list[str], dict[str, list[float]]]:
    """Return the column heads of a table, found by its first one, and its rows by their first cell.

    Raises:
        LookupError: The page has no such table.
    """
    lines = iter((DOCS / page).read_text(encoding="utf-8").splitlines())
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == title:
            next(lines)
            break
    else:
        raise LookupError(f"{page} has no table whose first column is {title!r}")
    rows: dict[str, list[float]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        name, *values = (cell.strip(" *") for cell in line.strip("|").split("|"))
        numbers = [float(value) for value in values if re.fullmatch(r"[\d.]+", value)]
        rows.setdefault(name, numbers)  # the first of rows that share a name
    return cells[1:], rows


def _draw(
    canvas: Canvas,
    left: float,
    title: str,
    labels: list[str],
    series: dict[str, list[float]],
    low: float,
    high: float,
) -> None:
    """Draw one panel: `labels` are numbers on a log axis, values go from `low` to `high`."""
    logs = [math.log(float(label)) for label in labels]
    x = [left + _LEFT + _WIDTH * (log - logs[0]) / (logs[-1] - logs[0]) for log in logs]

    def height(value: float) -> float:
        return _TOP + _HEIGHT * (high - value) / (high - low)

    canvas.text(left + 16, 24, title, "title")
    for i in range(6):
        value = low + (high - low) * i / 5
        y = height(value)
        canvas.line([Point(x[0], y), Point(x[-1], y)], "grid")
        canvas.text(x[0] - 8, y + 4, f"{value:g}", "small dim", "end")
    for place, label in zip(x, labels, strict=True):
        canvas.text(place, _TOP + _HEIGHT + 18, label, "small", "middle")
    start = left + 16
    for (style, text), (name, values) in zip(_STYLES, series.items(), strict=True):
        canvas.line([Point(place, height(v)) for place, v in zip(x, values, strict=True)], style)
        canvas.line([Point(start, 40), Point(start + 18, 40)], style)
        canvas.text(start + 24, 44, name, f"small {text}")
        start += 38 + 6.2 * len(name)
