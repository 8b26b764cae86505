"""Reading the project's Markdown: links, anchors, tables, code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]

_FENCE = re.compile(r"^( *)(```|~~~)(\w*)[^\n]*\n(.*?)^\1\2[ ]*$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:(?<=\n\n)|^)(?: {4}[^\n]*\n)+", re.MULTILINE)
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


class Table(NamedTuple):
    """A Markdown table; cells are stripped, `\\|` is a bar."""

    header: list[str]
    rows: list[list[str]]


class Page:
    """One Markdown file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self._without_fences = _FENCE.sub("\n", _COMMENT.sub("", self.text))
        self.prose = _INDENTED.sub("\n", self._without_fences)
        """The text without blocks of code."""

    @property
    def name(self) -> str:
        """Path from the repository's root."""
        return self.path.relative_to(ROOT).as_posix()

    def links(self) -> list[str]:
        """Targets of links and images."""
        return _LINK.findall(_CODE_SPAN.sub("`code`", self.prose))

    def anchors(self) -> set[str]:
        """Names of headings that lead to them on a forge and on the site alike."""
        names: set[str] = set()
        for heading in _HEADING.findall(self.prose):
            shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
            kept = re.sub(r"[^\w\- ]", "", shown.lower()).strip()
            forge, site = kept.replace(" ", "-"), re.sub(r"[-\s]+", "-", kept)
            if forge == site:
                names.add(forge)
        return names

    def code_spans(self) -> list[str]:
        """Inline code."""
        return _CODE_SPAN.findall(self.prose)

    def fenced(self, language: str) -> list[str]:
        """Fenced blocks of a language."""
        return [body for _, _, info, body in _FENCE.findall(self.text) if info == language]

    def indented(self) -> list[str]:
        """Indented blocks."""
        return [
            "\n".join(line[4:] for line in block.splitlines())
            for block in _INDENTED.findall(self._without_fences)
        ]

    def commands(self) -> list[str]:
        """Everything that may be typed into a shell, continued lines joined."""
        blocks = [
            *self.fenced("bash"),
            *self.fenced("sh"),
            *self.fenced("console"),
            *self.fenced(""),
            *self.indented(),
        ]
        joined = "\n".join(blocks).replace("\\\n", " ")
        return [*joined.splitlines(), *self.code_spans()]

    def tables(self) -> Iterator[Table]:
        """All tables."""
        rows: list[list[str]] = []
        for line in [*self.prose.splitlines(), ""]:
            if line.startswith("|"):
                cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
                rows.append([cell.strip().replace("\\|", "|") for cell in cells])
            elif rows:
                yield Table(rows[0], rows[2:])
                rows = []


def all_pages() -> list[Page]:
    """README, the documentation, and the Markdown of examples, patches and shipped weights."""
    patterns = (
        "*.md",
        "docs/*.md",
        "benchmarks/*.md",
        "examples/**/*.md",
        "patches/**/*.md",
        "vllm_trie/lab/tiny_model/*/README.md",
    )
    paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
    return [Page(path) for path in sorted(paths)]


def page(name: str) -> Page:
    """The page of that path."""
    return Page(ROOT / name)
