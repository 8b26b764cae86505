"""Links and anchors lead somewhere, on a forge and on the site."""

from __future__ import annotations

import json
import posixpath
import re
import tomllib

import pytest

from tests.unit.docs.pages import ROOT, Page, all_pages, page

PAGES = all_pages()


def broken_links(document: Page) -> list[str]:
    broken = []
    for link in document.links():
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = document.path if not name else (document.path.parent / name).resolve()
        exists = target.exists() and target.is_relative_to(ROOT)
        if exists and anchor:
            exists = target.suffix == ".md" and anchor in Page(target).anchors()
        if not exists:
            broken.append(link)
    return broken


@pytest.mark.parametrize("document", PAGES, ids=lambda p: p.name)
def test_links(document):
    assert broken_links(document) == []


def test_broken_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.docs.test_links.ROOT", tmp_path)
    path = tmp_path / "page.md"
    path.write_text("# A title\n[a](#a-title) [b](#b-title) [c](missing.md) `[d](code)`\n")
    assert broken_links(Page(path)) == ["#b-title", "missing.md"]


def test_every_page_can_be_reached():
    reached, waiting = set(), ["docs/index.md"]
    while waiting:
        name = waiting.pop()
        if name in reached or not name.endswith(".md"):
            continue
        reached.add(name)
        for link in page(name).links():
            if "://" not in link and not link.startswith("#"):
                target = posixpath.join(posixpath.dirname(name), link.partition("#")[0])
                waiting.append(posixpath.normpath(target))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= reached


def test_the_pages_are_few_and_short():
    pages = [page(f"docs/{path.name}") for path in (ROOT / "docs").glob("*.md")]
    of_users = [document for document in pages if document.path.name != "contributing.md"]
    words = sum(len(re.findall(r"\S*\w\S*", document.text)) for document in of_users)
    assert len(of_users) <= 13
    assert words <= 16_000


def test_no_number_is_of_a_program_that_is_gone():
    for document in PAGES:
        assert not re.findall(r"[0-9a-f]{7}:(?:benchmarks|tests)/", document.text), document.name


def test_blocks_of_json_and_toml_can_be_read():
    for document in PAGES:
        for block in document.fenced("json"):
            json.loads(block)
        for block in document.fenced("toml"):
            tomllib.loads(block)
