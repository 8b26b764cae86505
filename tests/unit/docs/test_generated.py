"""Drawings and tables are what their scripts make."""

import pytest

from docs.generate import contents
from docs.tools import tree_drawings


@pytest.mark.parametrize(("path", "text"), list(contents()), ids=lambda v: getattr(v, "name", ""))
def test_generated_files_are_up_to_date(path, text):
    assert path.read_text(encoding="utf-8") == text, "run: python -m docs.generate"


def test_the_drawn_step_is_a_real_one():
    step = tree_drawings.example_step()
    step.tree.validate(100, tree_drawings.NUM_NODES)
    taken = [step.words[node] for node in step.accepted]
    assert taken == tree_drawings.CONTINUATION[: len(taken)]
    assert step.accepted != list(range(len(taken))), "the drawing is to show a KV move"
