"""The wheel: its files, its compiled cores, and an engine with no more than it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkout import ROOT, tracked_files
from tests.processes import environment
from vllm_trie.lab.tiny_model import model_path
from vllm_trie.native import usable_sets

SET = usable_sets()[0]
USE = """
import sys
import vllm_trie
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda function: function()  # which imports vLLM anew
assert "site-packages" in vllm_trie.__file__, vllm_trie.__file__
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
SETTINGS = dict(
    model=sys.argv[1], enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=20 << 20
)
trees = {"method": "ngram_trie", "num_speculative_tokens": 16, "node_budget": "fixed"}
llm = LLM(**SETTINGS, speculative_config=trees)
[output] = llm.generate({"prompt_token_ids": [*range(40, 80)] * 3}, PARAMS, use_tqdm=False)
assert not [name for name in sys.modules if name.startswith("vllm_trie.lab")]
print(len(output.outputs[0].token_ids), "tokens")
"""


class Wheel(NamedTuple):
    """A wheel whose attention core is for one instruction set, and the files it was made of."""

    path: Path
    source: Path
    package: list[Path]


def build(source: Path, target: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel as pip does, without optimization."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(target)]
    settings = {"VLLM_TRIE_ATTENTION_SETS": SET, "CMAKE_CXX_FLAGS_RELEASE": "-O0"}
    for name, value in settings.items():
        command += ["-C", f"cmake.define.{name}={value}"]
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, env=environment(**variables)
    )
    if "No matching distribution found" in done.stderr:
        pytest.skip("no package index to take scikit-build-core, cmake and ninja from")
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from the files of the checkout."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = [path.relative_to(ROOT) for path in tracked_files()]
    package = [path for path in files if path.parts[0] == "vllm_trie"]
    root = map(Path, (".gitignore", "pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"))
    for path in [*package, *root]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    # What an editable install compiles into the source tree is not for a wheel.
    (source / "vllm_trie/native/cores").mkdir()
    (source / "vllm_trie/native/cores/trees-other.so").touch()
    done = build(source, folder)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return Wheel(path, source, package)


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    """Weights, C++ sources and other data must reach users who do not install from a checkout."""
    packed = set(zipfile.ZipFile(wheel.path).namelist())
    assert not {path.as_posix() for path in wheel.package} - packed
    assert any(name.endswith("LICENSE") for name in packed)
    top = {name.split("/")[0] for name in packed}
    assert {name for name in top if not name.endswith(".dist-info")} == {"vllm_trie"}
    # One wheel for every Python, with each core.
    assert "-py3-none-linux_" in wheel.path.name
    cores = {name.rpartition("/")[2] for name in packed if name.endswith(".so")}
    assert cores == {f"attention-{SET}.so", "ngrams-baseline.so", "trees-baseline.so"}


def test_a_source_without_a_compiler_says_so_at_installation(wheel, tmp_path):
    done = build(wheel.source, tmp_path, CXX="/nonesuch/c++")
    assert done.returncode != 0
    assert "vllm-trie could not be compiled" in done.stdout + done.stderr
    assert "g++ or clang++" in done.stdout + done.stderr


def test_an_engine_needs_neither_a_compiler_nor_the_laboratory(wheel, tmp_path):
    """Nor a home: what vLLM itself writes goes to a folder for temporary files."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", str(wheel.path)], check=True)
    shutil.rmtree(packages / "vllm_trie" / "lab")
    # vLLM of this environment; its own .pth files are not read, so not the checkout.
    (packages / "vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "lscpu").symlink_to(shutil.which("lscpu"))  # vLLM asks it for the cores
    nowhere = {
        "PATH": str(programs),
        "HOME": "/dev/null",
        "VLLM_CACHE_ROOT": str(tmp_path),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(python), *arguments], env=nowhere, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", USE, str(model_path())).endswith("40 tokens\n")
    commands = run("-m", "vllm_trie.cli", "--help")
    assert "items" in commands
    assert "demo" not in commands
