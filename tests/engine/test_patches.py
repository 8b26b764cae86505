"""The patches against vLLM: each applies, and its test fails without it and passes with it.

vLLM's files are linked into a folder in which those that the patches touch are copies.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.newer_vllm import newer_vllm
from tests.processes import ROOT, environment, run_program

PATCHES = ROOT / "patches"
INSTALLED = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
VERSIONS = ("0.32.0", "0.33.0")


def vllm_of(version: str) -> Path:
    """The files of a release; the test is skipped where they cannot be had."""
    return INSTALLED if version == "0.32.0" else Path(newer_vllm(version)["PYTHONPATH"]) / "vllm"


def series(version: str) -> list[Path]:
    return sorted((PATCHES / f"vllm-{version}").glob("*.patch"))


def touched(patch: Path) -> list[str]:
    return re.findall(r"^diff --git a/(\S+) b/\1$", patch.read_text(), re.MULTILINE)


def link(vllm: Path, folder: Path, version: str) -> Path:
    """A folder with vLLM and a folder for its tests, ready to be patched."""
    shutil.copytree(vllm, folder / "vllm", copy_function=os.symlink)
    (folder / "tests" / "v1").mkdir(parents=True)
    for name in {name for patch in series(version) for name in touched(patch)}:
        if (linked := folder / name).exists():
            original = linked.resolve()
            linked.unlink()
            shutil.copyfile(original, linked)
    return folder


def outcomes(vllm: Path, folder: Path) -> dict[str, set[str]]:
    """Outcomes of the tests in `folder` with the vLLM that lies in another, by file."""
    options = ["-q", "-rpfE", "-n", "0", "-p", "no:cacheprovider", "--rootdir=."]
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, "tests"],
        cwd=folder,
        env=environment(PYTHONPATH=str(vllm), VLLM_PLUGINS="", TORCHDYNAMO_DISABLE="1"),
        capture_output=True,
        text=True,
        check=False,
    )
    by_file: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) (\S+\.py)", run.stdout, re.MULTILINE):
        by_file.setdefault(name, set()).add(outcome)
    return by_file


def test_subjects_and_reasons():
    numbers = {version: [int(patch.name[:4]) for patch in series(version)] for version in VERSIONS}
    assert sorted({*chain(*numbers.values())}) == [*range(1, 10)]
    assert [len(of) - len({*of}) for of in numbers.values()] == [0, 0]
    for version in VERSIONS:
        for patch in series(version):
            head, _, _ = patch.read_text().partition("\ndiff --git ")
            assert re.search(r"^Subject: \[PATCH\] \[\w+\]\S* \S", head, re.MULTILINE), patch.name
            assert len(head.partition("\n\n")[2].split()) > 15, f"{patch.name} gives no reason"


@pytest.mark.parametrize("version", VERSIONS)
def test_each_test_fails_without_its_patch(version, tmp_path):
    vllm = vllm_of(version)
    folder = link(vllm, tmp_path, version)
    script = [PATCHES / "apply.sh", version, folder]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [Path(line).name for line in done.stdout.splitlines()] == [
        patch.name for patch in series(version)
    ]
    tests = {name for patch in series(version) for name in touched(patch) if name[:6] == "tests/"}
    assert len(tests) == len(series(version))
    without = outcomes(vllm.parent, folder)
    assert {name for name in tests if "FAILED" in without.get(name, ())} == tests
    assert outcomes(folder, folder) == {name: {"PASSED"} for name in tests}
    below = "" if version == "0.32.0" else f"{os.pathsep}{vllm.parent}"
    assert run_program("tests.engine.patched_run", PYTHONPATH=f"{folder}{below}") == {
        "vllm": str(folder / "vllm"),
        "method": "custom_speculator",
        "same": True,
        "accepted": True,
    }
