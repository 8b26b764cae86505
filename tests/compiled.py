"""C++ that a test writes, compiled to where the package looks for its cores."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_trie.native import library, usable_sets


def compile_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile a library called as its source, whose folder becomes that of all cores."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    target = source.with_name(f"{source.stem}-{usable_sets()[0]}.so")
    command = [compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    monkeypatch.setattr(library, "FOLDER", source.parent)
    return target
