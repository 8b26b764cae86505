"""C++ that a test writes, compiled to where the package looks for its cores."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_trie.native import library, usable_sets


def compile_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile a library called as its source, whose folder becomes that of all cores, three below
    that of the source."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    folder = source.parent / "package" / "native" / "cores"
    folder.mkdir(parents=True)
    target = folder / f"{source.stem}-{usable_sets()[-1]}.so"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    monkeypatch.setattr(library, "FOLDER", folder)
    return target
