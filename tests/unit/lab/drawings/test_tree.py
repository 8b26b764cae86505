from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import token_trees
from vllm_trie.lab.drawings.tree import draw_svg, draw_text, visible_text
from vllm_trie.tree import TokenTree

SVG = "{http://www.w3.org/2000/svg}"
TREE = TokenTree.from_lists([1, 2, 3], [-1, 0, -1], [0.7, 0.5, 0.004])


@given(token_trees(), st.data())
def test_text_has_one_marked_line_for_each_node(tree, data):
    nodes = list(range(tree.num_nodes))
    accepted = data.draw(st.sets(st.sampled_from(nodes))) if nodes else set()
    lines = draw_text(tree, lambda token: f"<{token}>", accepted).split("\n")
    assert len(lines) == tree.num_nodes + 1
    assert sum(line.endswith("✓") for line in lines) == len(accepted)
    for token in range(6):
        drawn = sum(f" <{token}>" in line for line in lines)
        assert drawn == int((tree.token_ids == token).sum())


def test_text_shows_the_shape_and_probabilities():
    lines = draw_text(TREE, lambda token: "abcd"[token], accepted=[0]).split("\n")
    assert lines == ["●", "├─ b  (70%) ✓", "│  └─ c  (50%)", "└─ d  (0.4%)"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "␣the"),
        ("\n", "\\n"),
        ("\t", "\\t"),
        ("\r", "\\r"),
        ("", "∅"),
        ("\x00", "\\u{0}"),
        ("\x1b[31m", "\\u{1b}[31m"),
        ("\ud800", "\\u{d800}"),
        ("東é", "東é"),
    ],
)
def test_invisible_characters_are_shown(text, shown):
    assert visible_text(text) == shown


@given(token_trees(), st.text(max_size=12))
def test_svg_is_well_formed_whatever_the_tokens_say(tree, text):
    svg = draw_svg(tree, lambda _: text, accepted=range(min(2, tree.num_nodes)))
    svg.encode()
    root = ElementTree.fromstring(svg)
    nodes = root.findall(f"{SVG}g")
    assert len(nodes) == len(root.findall(f"{SVG}path")) == tree.num_nodes
    for node in nodes:
        label = node.find(f"{SVG}text")
        assert label.text == visible_text(text)


@given(token_trees(max_nodes=64))
def test_svg_boxes_do_not_overlap_and_lie_inside(tree):
    root = ElementTree.fromstring(draw_svg(tree, lambda token: "word" * (token + 1)))
    boxes = []
    for rect in root.iterfind(f"{SVG}g/{SVG}rect"):
        x, y, width, height = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + width <= float(root.attrib["width"])
        assert y >= 0
        assert y + height <= float(root.attrib["height"])
        boxes.append((x, y, x + width, y + height))
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
