"""Hooks of mkdocs: links from a page to files outside of docs/.

On a forge `../examples/` and `../README.md` lead to the file. The site takes those files in as
downloads, or as pages where they are Markdown, so that the same link works there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "repository"
"""Where the site keeps the files from outside of docs/."""

_WORDS = r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]"
_OUTSIDE = re.compile("(?<!!)" + _WORDS + r"\((?:\.\./)+([^)#\s]*)(#[^)\s]*)?\)")
_ANY = re.compile("(!?)" + _WORDS + r"\(([^)\s]+)\)")


def outside_links(markdown: str) -> set[str]:
    """Paths, relative to the repository's root, that a page in docs/ links to."""
    return {match[2].rstrip("/") for match in _OUTSIDE.finditer(markdown)}


def on_files(files: Any, config: Any) -> Any:
    """Add what the pages link to."""
    from mkdocs.structure.files import File

    names: set[str] = set()
    for page in sorted(Path(config["docs_dir"]).glob("*.md")):
        names |= outside_links(page.read_text(encoding="utf-8"))
    for name in sorted(names):
        path = ROOT / name
        if path.is_dir() and (path / "README.md").is_file():
            path = path / "README.md"
        if path.is_file():
            target = posixpath.join(FOLDER, path.relative_to(ROOT).as_posix())
            content = path.read_text(encoding="utf-8")
            if path.suffix == ".md":
                content = _inside_site(content, path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, target, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    """Lead links out of docs/ to the copies."""
    if page.file.src_uri.startswith(FOLDER):
        return markdown

    def lead(match: re.Match[str]) -> str:
        name, anchor = match[2].rstrip("/"), match[3] or ""
        if (ROOT / name).is_dir():
            readme = ROOT / name / "README.md"
            if not readme.is_file():
                return match[1]  # a folder has no page: the words stay
            name += "/README.md"
        return f"[{match[1]}]({FOLDER}/{name}{anchor})"

    return _OUTSIDE.sub(lead, markdown)


def _inside_site(markdown: str, source: str) -> str:
    """A repository file's text with its own relative links led to the site, or taken out."""

    def lead(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            return match[0]
        name, _, anchor = target.partition("#")
        full = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        if full.startswith("docs/"):
            page = "../" * (source.count("/") + 1) + full.removeprefix("docs/")
            return f"{image}[{words}]({page}{'#' + anchor if anchor else ''})"
        return words

    return _ANY.sub(lead, markdown)
