"""The page as text: it is self-contained, and what a model wrote cannot become markup."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_trie.extras.traces.trace_file import Header, Step, Trace
from vllm_trie.lab.explore import page
from vllm_trie.lab.explore.origins import origins
from vllm_trie.lab.explore.page import _speed, pieces
from vllm_trie.tree import TokenTree

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "<img src=x onerror=alert(1)>",
    "&lt;b&gt;",
    "$data ${style}",
    "\u2028\u2029\u202e",
    '"\\',
    "\ud800",
]


class Scripts(HTMLParser):
    """The content of a page's scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.contents: list[str] = []
        self.feed(text)

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.contents.append(data)


@given(st.text())
def test_any_text_arrives(text):
    header = Header.of("", "plain", f"folder/{text}", "t", [0])
    content = page([Trace(header, [], "complete")], lambda token_ids: text)
    document = json.loads(Scripts(content).contents[0])
    assert document["prompt"] == text
    assert document["title"] == f"folder/{text}".rstrip("/").rpartition("/")[2]
    data = re.search(r'id="data">(.*?)</script>', content, re.DOTALL)
    assert not set("<>&") & set(data[1])


def test_nothing_comes_from_elsewhere():
    tokens = list(range(len(HOSTILE)))
    tree = TokenTree.from_lists(tokens, [-1] * len(tokens))
    header = Header.of("</script>", "ngram_trie", "a/<b>model", "t", tokens)
    steps = [Step.of(tree, (3,), (3, 4), 0.1)]
    text = page([Trace(header, steps, "complete")], lambda ids: "".join(HOSTILE[i] for i in ids))
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    _, script = Scripts(text).contents
    assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(", script)


def trace_of(method: str, *steps: Step, prompt: Sequence[int] = (0, 1)) -> Trace:
    return Trace(Header.of("", method, "m", "t", prompt), list(steps), "complete")


def test_nodes_are_from_the_longest_n_gram_that_occurs():
    empty = TokenTree.empty()
    tree = TokenTree.from_lists([5, 6, 9, 3], [-1, 0, 0, -1])
    trace = trace_of(
        "x",
        Step.of(empty, (), (8,), 0.1),
        Step.of(empty, (), (7,), 0.1),
        Step.of(empty, (), (9,), 0.1),
        Step.of(empty, (), (8,), 0.1),
        Step.of(TokenTree.from_lists([7, 5, 2], [-1, 0, 0]), (0,), (7, 2), 0.1),
        Step.of(tree, (), (1,), 0.1),
        prompt=[2, 5, 6, 7],
    )
    # 8 7 is in the output, 7 5 nowhere. 2 5 6 is in the prompt, 5 9 and 2 3 are nowhere.
    assert list(origins(trace)) == ["", "", "", "", "oee", "ppee"]


def test_speed_is_measured_where_plain_decoding_was_recorded():
    empty, tree = TokenTree.empty(), TokenTree.from_lists([5], [-1])
    prefill, undrafted = Step.of(empty, (), (1,), 9.0), Step.of(empty, (), (1,), 0.2)
    drafted = Step.of(tree, (0,), (5, 6), 0.2)
    plain = trace_of("plain", prefill, undrafted, undrafted)
    trees = trace_of("x", prefill, drafted, drafted)
    assert _speed(plain, [plain, trees]) is None
    measured = _speed(trees, [plain, trees])
    assert measured is not None
    assert measured == (pytest.approx(2.0), "measured against plain")
    assert _speed(trees, [trees]) is None  # without a step like plain decoding's
    other = trace_of("plain", prefill, undrafted, prompt=[3])
    mixed = trace_of("x", prefill, *[drafted] * 3, *[undrafted] * 3)
    estimated = _speed(mixed, [mixed, other])
    assert estimated.factor == pytest.approx(1.5)  # 9 tokens in the time of 6 steps
    assert "median of 3 steps" in estimated.source


@given(st.text(max_size=12), st.data())
def test_pieces_add_up(text, data):
    """Tokens are bytes here, so that characters are spread over steps."""
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=4)))
    bounds = [0, *cuts, len(encoded)]
    parts = [encoded[start:end] for start, end in pairwise(bounds)]

    def decode(token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    texts = list(pieces(parts, decode))
    assert "".join(texts) == text
    assert len(texts) == len(parts)
