"""Drawings, tables and the dashboard are what their scripts make."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs import generate
from docs.generate import DOCS, DRAWINGS, contents
from docs.tools import svg, tree_drawings


@pytest.mark.parametrize(("path", "text"), list(contents()), ids=lambda v: getattr(v, "name", ""))
def test_generated_files_are_up_to_date(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run: python -m docs.generate"


def test_check_notices_a_stale_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert generate.main(["--check"]) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_keeps_its_shapes_on_the_canvas(name: str) -> None:
    root = ElementTree.fromstring((DOCS / "drawings" / f"{name}.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.find(f"{space}title").text
    for box in root.iter(f"{space}rect"):
        assert float(box.get("x")) + float(box.get("width")) <= width, ElementTree.tostring(box)
        assert float(box.get("y")) + float(box.get("height")) <= height, ElementTree.tostring(box)
    for text in root.iter(f"{space}text"):
        # Seven pixels a letter is more than the fonts take on average.
        room = {"start": width - float(text.get("x")), "end": float(text.get("x"))}
        anchored = text.get("text-anchor")
        half = min(float(text.get("x")), width - float(text.get("x")))
        small = "small" in text.get("class")
        needed = len(text.text) * (6.7 if "token" in text.get("class") else 5.6 if small else 7.0)
        assert needed <= room.get(anchored, 2 * half) + 1, text.text


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colors", [svg._LIGHT, svg._DARK], ids=["light", "dark"])
def test_text_can_be_read(colors: dict[str, str]) -> None:
    """At least 4.5 to 1, the ratio that WCAG 2 asks of text."""
    for background in ("page", "soft", "blue", "green", "amber", "red"):
        assert contrast(colors["ink"], colors[background]) >= 4.5, background
    for text in ("dim", "green-line", "amber-line", "red-line", "blue-line"):
        assert contrast(colors[text], colors["page"]) >= 4.5, text


def test_both_schemes_are_in_every_file() -> None:
    for name in DRAWINGS:
        text = (DOCS / "drawings" / f"{name}.svg").read_text()
        assert svg._LIGHT["page"] in text
        assert re.search(r"prefers-color-scheme: dark.*" + svg._DARK["page"], text)


def test_the_drawn_step_is_a_real_one() -> None:
    step = tree_drawings.example_step()
    step.tree.validate(100, tree_drawings.NUM_NODES)
    taken = [step.words[node] for node in step.accepted]
    assert taken == tree_drawings.CONTINUATION[: len(taken)]
    assert step.accepted != list(range(len(taken))), "the drawing is to show a KV move"
