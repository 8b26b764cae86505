"""The instruction sets that CMake chooses for a compiler and a processor, without compiling."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

REJECTS_LEVELS = """#!/bin/sh
case "$*" in *-march=x86-64-v*) echo "bad value for -march" >&2; exit 1; esac
exec g++ "$@"
"""
"""A compiler like GCC 8, which does not know the levels of x86-64."""


def compiled(folder: Path, *settings: str) -> dict[str, str]:
    """Return the command that compiles each core's first file, by the core's set, for a wheel."""
    cmake = Path(sys.executable).with_name("cmake")
    if not cmake.exists() or shutil.which("g++") is None:
        pytest.skip("no CMake or no C++ compiler here")
    given = ["CMAKE_EXPORT_COMPILE_COMMANDS=ON", "SKBUILD_STATE=wheel", *settings]
    command = [str(cmake), "-S", str(ROOT), "-B", str(folder), *(f"-D{one}" for one in given)]
    subprocess.run(command, check=True, capture_output=True)
    listed = json.loads((folder / "compile_commands.json").read_text())
    return {Path(one["output"]).parts[1].removesuffix(".dir"): one["command"] for one in listed}


def test_a_compiler_without_the_levels_compiles_the_baseline(tmp_path):
    compiler = tmp_path / "g++-8"
    compiler.write_text(REJECTS_LEVELS)
    compiler.chmod(0o755)
    commands = compiled(tmp_path / "build", f"CMAKE_CXX_COMPILER={compiler}")
    assert commands.keys() == {"attention-baseline", "ngrams-baseline", "trees-baseline"}


def test_other_processors_have_nothing_of_the_builders(tmp_path):
    commands = compiled(tmp_path, "CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=aarch64")
    assert commands.keys() == {"attention-baseline", "ngrams-baseline", "trees-baseline"}
    assert not [command for command in commands.values() if "-march" in command]
