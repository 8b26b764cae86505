"""Make the drawings and fill in the tables that are read off the code.

python -m docs.generate          # write them
python -m docs.generate --check  # exit 1 if a file is not up to date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from docs.tools import charts, engine_drawings, tables, tree_drawings

DOCS = Path(__file__).resolve().parent
DRAWINGS = {
    "trie": tree_drawings.trie,
    "step": tree_drawings.step,
    "mask": tree_drawings.mask,
    "blocks": engine_drawings.blocks,
    "path": engine_drawings.path,
    "chats": charts.chats,
    "load": charts.load,
    "nodes": charts.nodes,
    "beams": charts.beams,
}


def contents() -> Iterator[tuple[Path, str]]:
    """Each generated file and what it should hold."""
    for name, draw in DRAWINGS.items():
        yield DOCS / "drawings" / f"{name}.svg", draw()
    for page in [*sorted(DOCS.glob("*.md")), *DOCS.parent.glob("ARCHITECTURE.md")]:
        text = page.read_text(encoding="utf-8")
        if "<!-- generated: " in text:
            yield page, tables.fill_in(text)


def main(arguments: list[str]) -> int:
    """Write what has changed; with `--check` only say so."""
    stale = [
        (path, text)
        for path, text in contents()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if "--check" not in arguments:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS.parent))
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
