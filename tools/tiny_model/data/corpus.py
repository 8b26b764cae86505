"""The training text: the Python standard library's own sources.

They are on every machine that runs Python, their licence (PSF) allows redistribution of what is
learnt from them, and a model that has read only them knows one world well: Python code.
"""

from __future__ import annotations

import re
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

_HELD_OUT = (
    "textwrap queue sched fractions csv graphlib heapq bisect shlex calendar cmd getopt filecmp "
    "fnmatch colorsys shelve"
)
HELD_OUT_MODULES: frozenset[str] = frozenset(_HELD_OUT.split(" "))
"""Modules that no training row may come from, together with their tests."""

_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "pydoc_data", "cjkencodings")
)
_SKIPPED_PREFIXES = ("lib2to3/tests/data", "idlelib/help", "config-")


@dataclass(frozen=True)
class SourceFile:
    """One source file: its path below the library's root (with ``/``) and its text."""

    path: str
    text: str

    @property
    def is_test(self) -> bool:
        return "test" in self.path.split("/")[0] or "/test" in self.path

    @property
    def module(self) -> str:
        """Module name, for a test the module it tests: ``test/test_csv.py`` → ``csv``."""
        return self.path.rsplit("/", 1)[-1].removesuffix(".py").removeprefix("test_")


@dataclass(frozen=True)
class Corpus:
    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def _looks_like_code(text: str) -> bool:
    """Leave out tables of numbers, encoded data and files of mostly foreign characters."""
    size = len(text)
    if size < 200:
        return False
    letters = sum(map(str.isalpha, text)) / size
    digits = sum(map(str.isdigit, text)) / size
    foreign = sum(not char.isascii() for char in text) / size
    longest = max(map(len, text.split("\n")))
    return letters > 0.45 and digits < 0.09 and foreign < 0.01 and longest <= 400


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the library below ``root`` (the running interpreter's own by default).

    Files come in sorted order, so the corpus depends on the Python version alone.
    """
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # the library's tests have many
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if _SKIPPED_FOLDERS & set(relative.split("/")) or relative.startswith(_SKIPPED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        text = re.sub(r"\r\n?", "\n", text.replace("\x0c", "")).expandtabs(8)
        if not _looks_like_code(text):
            continue
        file = SourceFile(relative, text)
        held = file.module in HELD_OUT_MODULES or bool(
            HELD_OUT_MODULES & set(relative.split("/")[:-1])
        )
        (held_out if held else train).append(file)
    if not train:
        raise FileNotFoundError(
            f"no Python sources found below {root}: the corpus is the standard library; give a "
            "folder that holds it"
        )
    return Corpus(tuple(train), tuple(held_out))
