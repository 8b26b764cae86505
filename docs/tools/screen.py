"""Draw the output of a command as a terminal: its first and its last lines.

FORCE_COLOR=1 TTY_INTERACTIVE=0 COLUMNS=92 make -s demo |
    .venv/bin/python -m docs.tools.screen "make demo" 17 24 > docs/img/demo.svg
"""

from __future__ import annotations

import io
import re
import sys

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Rich's, without fonts from elsewhere: the reader's own monospaced one serves."""


def main(title: str, first: str, last: str) -> str:
    """Return the SVG of what comes in."""
    lines = Text.from_ansi(sys.stdin.read().rstrip()).split()
    shown = [*lines[: int(first)], Text("  ⋮", style="dim"), *lines[-int(last) :]]
    width = max(cell_len(line.plain.rstrip()) for line in shown)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    for line in shown:
        line.rstrip()
        console.print(line, soft_wrap=True)
    return console.export_svg(title=title, code_format=FORMAT)


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
