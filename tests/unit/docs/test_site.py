"""The site builds: a wrong link is a warning, which fails. It loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.unit.docs.pages import ROOT

LACKING = [name for name in ("mkdocs", "material") if importlib.util.find_spec(name) is None]
needs_mkdocs = pytest.mark.skipif(
    bool(LACKING), reason="mkdocs-material is not installed; `make docs` installs it"
)


class _Html(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("img", "script") and values.get("src"):
            self.loaded.append(values["src"] or "")
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(values["href"] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {}
    for path in folder.rglob("*.html"):
        if path.name != "404.html":
            pages[path] = _Html()
            pages[path].feed(path.read_text(encoding="utf-8"))
    return pages


@needs_mkdocs
def test_nothing_is_loaded_from_elsewhere(site):
    assert len(site) > 15
    for path, html in site.items():
        assert not [link for link in html.loaded if "://" in link], path.name
