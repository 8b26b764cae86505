"""The compiled cores ask for no newer libraries than those of a wheel's tag."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from vllm_trie.native import FOLDER

NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 1, 0)}
"""Those of manylinux_2_28, as `auditwheel` has them."""
CORES = sorted(FOLDER.glob("*.so"))


@pytest.mark.parametrize("core", CORES, ids=[path.stem for path in CORES])
def test_versions_of_symbols(core):
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here, which comes with a compiler")
    done = subprocess.run(["objdump", "-T", str(core)], capture_output=True, text=True, check=True)
    # In parentheses, or without them in older releases.
    listed = re.findall(r"\b([A-Z]+)_(\d+(?:\.\d+)+)\b", done.stdout)
    assert {"GLIBC"} <= {library for library, _ in listed} <= NEWEST.keys()
    newer = {
        f"{library}_{version}"
        for library, version in listed
        if tuple(map(int, version.split("."))) > NEWEST[library]
    }
    assert not newer
