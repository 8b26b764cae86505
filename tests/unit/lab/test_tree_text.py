from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tree.strategies import token_trees
from vllm_trie.lab.tree_text import draw_text, visible_text
from vllm_trie.tree import TokenTree

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
