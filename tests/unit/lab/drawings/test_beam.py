"""The drawing of a search, and the command that draws."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.unit.beam.models import random_model, run_search
from vllm_trie.beam import SearchSettings
from vllm_trie.lab.commands.beam import app
from vllm_trie.lab.drawings.beam import draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace():
    search = run_search(random_model(8), SearchSettings(3, 5, (0,), trace=True))
    search.hypotheses()
    assert search.trace is not None
    return search.trace


def token_text(token: int) -> str:
    return [" the", "<b>&", '"', "\n", "a"][token % 5]


def test_text_has_a_line_per_node(trace):
    lines = draw_text(trace, token_text).splitlines()
    assert len(lines) == 2 + len(trace.token_ids)
    assert "beam width 3" in lines[0]
    body = "\n".join(lines[1:-1])
    assert body.count("✗") == trace.fates.count("dropped")
    assert body.count("■") == trace.fates.count("finished")
    for rank, score in enumerate(trace.scores, 1):
        assert f"#{rank} {score:.3f}" in body
    assert "␣the" in body
    assert "\\n" in body


def test_dropped_candidates_can_be_left_out(trace):
    lines = draw_text(trace, token_text, dropped=False).splitlines()
    assert len(lines) == 2 + len(trace.token_ids) - trace.fates.count("dropped")


def test_svg_is_well_formed_and_complete(trace):
    root = ElementTree.fromstring(draw_svg(trace, token_text))
    nodes = list(root.iter(f"{SVG}g"))
    assert len(nodes) == len(trace.token_ids)
    for fate in ("kept", "dropped", "finished"):
        drawn = [node for node in nodes if fate in node.get("class").split()]
        assert len(drawn) == trace.fates.count(fate)
    assert "<b>&" in [element.text for element in root.iter(f"{SVG}text")]
    boxes = [
        tuple(float(box.get(name)) for name in ("x", "y", "width", "height"))
        for box in root.iter(f"{SVG}rect")
        if box.get("x")
    ]
    for i, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[:i]:
            apart = (
                x + width <= other_x
                or other_x + other_width <= x
                or y + height <= other_y
                or other_y + other_height <= y
            )
            assert apart, "boxes overlap"


def test_command_draws_a_saved_search(trace, tmp_path):
    saved = tmp_path / "search.json"
    texts = {str(token): token_text(token) for token in trace.token_ids}
    saved.write_text(json.dumps({"trace": trace.to_dict(), "token_texts": texts}))
    image = tmp_path / "search.svg"
    result = CliRunner().invoke(app, ["draw", str(saved), "--svg", str(image)])
    assert result.exit_code == 0, result.output
    assert draw_text(trace, token_text) in result.output
    assert image.read_text() == draw_svg(trace, token_text)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"trace": {"token_ids": [1]}}',
        '{"trace": {"steps": 1, "colour": 2}}',
        '{"trace": {"token_ids": [1], "parents": [0], "sums": [0], "fates": ["kept"]}}',
    ],
)
def test_command_refuses_other_files(content, tmp_path):
    saved = tmp_path / "search.json"
    saved.write_text(content)
    result = CliRunner().invoke(app, ["draw", str(saved)])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
