"""The wheel: its files, its compiled cores, and their use where there is no compiler."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkout import ROOT, tracked_files
from vllm_trie.attention import native as attention
from vllm_trie.native import NativeBuildError, NativeLibrary, cpu_flags, find_compiler
from vllm_trie.native.prebuilt import INSTRUCTION_SETS
from vllm_trie.ngrams import native as ngrams
from vllm_trie.tree import batch as trees

SET = "x86-64-v3"
LIBRARIES = [
    trees.LIBRARY,
    ngrams.LIBRARY,
    attention.library(),
]

USE = """
import torch
import vllm_trie
from vllm_trie.attention.native import load_kernels
from vllm_trie.ngrams.native import NativeIndex

index = NativeIndex(4)
index.add_text([1, 2, 3])
print(index.num_tokens, load_kernels().instructions)
print(NativeIndex.__module__, vllm_trie.__file__)
"""


class Wheel(NamedTuple):
    """A wheel for one instruction set, and how the compiler was called for it."""

    path: Path
    commands: list[dict[str, str]]
    source: Path
    package: list[Path]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """Build a wheel from the checkout as pip does, without optimization: that takes minutes."""
    try:
        find_compiler()
    except NativeBuildError:
        pytest.skip("no C++ compiler here")
    if not INSTRUCTION_SETS[SET] <= cpu_flags():
        pytest.skip("wheels with compiled cores are for x86-64 processors with AVX2")
    folder = tmp_path_factory.mktemp("wheel")
    source, build = folder / "source", folder / "build"
    files = [path.relative_to(ROOT) for path in tracked_files()]
    package = [path for path in files if path.parts[0] == "vllm_trie"]
    others = [path for path in files if path.parts[0] == "tools"]
    assert others
    root = map(Path, ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"))
    for path in [*package, *others, *root]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    settings = {
        "build-dir": build,
        "cmake.define.VLLM_TRIE_SETS": SET,
        "cmake.define.CMAKE_CXX_FLAGS_RELEASE": "-O0",
        "cmake.define.CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
    }
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder)]
    for name, value in settings.items():
        command += ["-C", f"{name}={value}"]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    if "No matching distribution found" in done.stderr:
        pytest.skip("no package index to take scikit-build-core, cmake and ninja from")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    commands = json.loads((build / "compile_commands.json").read_text())
    return Wheel(path, commands, source, package)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Wheel) -> None:
    """Weights, C++ sources and other data must reach users who do not install from a checkout.

    The code that made the weights stays in the checkout.
    """
    packed = set(zipfile.ZipFile(wheel.path).namelist())
    assert not {path.as_posix() for path in wheel.package} - packed
    assert any(name.endswith("LICENSE") for name in packed)
    top = {name.split("/")[0] for name in packed}
    assert {name for name in top if not name.endswith(".dist-info")} == {"vllm_trie"}
    # The shipped model's weights and prompts, not the code that trained it.
    modules = {name for name in packed if name.startswith("vllm_trie/lab/tiny_model/")}
    assert {name.rpartition("/")[2] for name in modules if name.endswith(".py")} == {
        "__init__.py",
        "chat_prompts.py",
    }
    # One wheel for every Python, with each core.
    assert "-py3-none-linux_" in wheel.path.name
    cores = {name.rpartition("/")[2] for name in packed if name.endswith(".so")}
    assert cores == {f"{library.name}-{SET}.so" for library in LIBRARIES}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_core_is_compiled_as_on_first_use(wheel: Wheel, library: NativeLibrary) -> None:
    mine = [entry for entry in wheel.commands if f"/{library.name}-{SET}.dir/" in entry["command"]]
    sources = {Path(entry["file"]).relative_to(wheel.source) for entry in mine}
    assert sources == {path.relative_to(ROOT) for path in library.sources}
    expected_flags = set(library.flags) - {"-O3", "-march=native"}  # -O3 is CMake's default
    for entry in mine:
        flags = {word for word in entry["command"].split() if word.startswith(("-f", "-m", "-std"))}
        assert flags == expected_flags | {"-fPIC", f"-march={SET}"}


def test_an_installed_wheel_needs_no_compiler(wheel: Wheel, tmp_path: Path) -> None:
    """Also with a home that does not exist and nowhere to keep compiled code."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", str(wheel.path)], check=True)
    # torch and NumPy of this environment; its own .pth files are not read, so not the checkout.
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    nowhere = {"PATH": "", "HOME": "/dev/null", "VLLM_TRIE_CACHE_DIR": "/dev/null/cache"}
    done = subprocess.run(
        [str(python), "-c", USE], env=nowhere, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 AVX2\n")
    assert str(packages) in done.stdout
