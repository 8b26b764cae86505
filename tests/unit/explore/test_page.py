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

from vllm_trie.explore import Header, Step, Trace, page
from vllm_trie.explore.page import pieces
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


def hostile(token_ids: Sequence[int]) -> str:
    return "".join(HOSTILE[token % len(HOSTILE)] for token in token_ids)


def a_page(end: str = "complete") -> str:
    tokens = list(range(len(HOSTILE)))
    tree = TokenTree.from_lists(tokens, [-1] * len(tokens))
    header = Header.of("</script>", "ngram_trie", "a/<b>model", "t", tokens)
    return page([Trace(header, [Step.of(tree, (3,), (3, 4), 0.1)], end)], hostile)  # type: ignore[arg-type]


class Elements(HTMLParser):
    """Start tags with their attributes, and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def test_hostile_text_stays_data() -> None:
    found = Elements(a_page())
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not [tag for tag, _ in found.tags if tag in ("img", "b")]
    document = json.loads(found.scripts[0])
    assert list(document["labels"]) == [str(token) for token in range(len(HOSTILE))]
    assert document["labels"]["0"].startswith("</script>")
    assert document["prompt"] == "".join(HOSTILE)
    assert document["runs"][0]["steps"][0]["text"] == HOSTILE[3] + HOSTILE[4]


@given(st.text())
def test_any_text_arrives(text: str) -> None:
    header = Header.of("", "plain", "m", "t", [0])
    content = page([Trace(header, [], "complete")], lambda token_ids: text, title=text)
    found = Elements(content)
    document = json.loads(found.scripts[0])
    assert (document["prompt"], document["title"]) == (text, text or "m")
    data = re.search(r'id="data">(.*?)</script>', content, re.DOTALL)
    assert data is not None
    assert not set("<>&") & set(data[1])


def test_nothing_comes_from_elsewhere() -> None:
    text = a_page()
    for tag, attributes in Elements(text).tags:
        assert tag not in ("link", "iframe", "object", "base", "img")
        assert not {"src", "href", "style"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")]
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    script = Elements(text).scripts[1]
    assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(", script)


@pytest.mark.parametrize("end", ["steps", "bytes", "missing"])
def test_truncated_traces_say_so(end: str) -> None:
    document = json.loads(Elements(a_page(end)).scripts[0])
    assert "truncated" in document["runs"][0]["notice"]


@given(st.text(max_size=12), st.data())
def test_pieces_add_up(text: str, data: st.DataObject) -> None:
    """Tokens are bytes here, so that characters are spread over steps."""
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=4)))
    bounds = [0, *cuts, len(encoded)]
    parts = [encoded[start:end] for start, end in pairwise(bounds)]

    def decode(token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    found = list(pieces(parts, decode))
    assert "".join(found) == text
    assert len(found) == len(parts)
