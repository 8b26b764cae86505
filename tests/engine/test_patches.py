"""The patches against vLLM: they apply, and the plugin does the same on a patched vLLM.

vLLM's Python files are copied, its libraries linked; the copy is patched and takes the installed
package's place in processes of their own, which run the suite's own tests of exactness. There the
plugin uses the patches' extension points, and `patched_checks.py` makes sure that it replaces
nothing at run time.
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python

PATCHES = ROOT / "patches"
INSTALLED = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])


def copy_installed_vllm(folder: Path) -> None:
    """A copy that can be patched, in `folder`/vllm."""

    def copy_or_link(source: str, target: str) -> None:
        if source.endswith(".so"):
            os.symlink(source, target)
        else:
            shutil.copy2(source, target)

    shutil.copytree(INSTALLED, folder / "vllm", copy_function=copy_or_link)


def series(version: str = "0.32.0") -> list[Path]:
    return sorted((PATCHES / f"vllm-{version}").glob("*.patch"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a patched vLLM, made with the script that users are told to use."""
    folder = tmp_path_factory.mktemp("patched")
    copy_installed_vllm(folder)
    script = [PATCHES / "apply.sh", "0.32.0", folder]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [Path(line).name for line in done.stdout.splitlines()] == [p.name for p in series()]
    return folder


def touched(patch: Path) -> set[str]:
    return set(re.findall(r"^diff --git a/(\S+) b/\1$", patch.read_text(), re.MULTILINE))


def test_every_patch_changes_what_it_says_and_nothing_is_left_over(patched: Path) -> None:
    expected = set().union(*map(touched, series()))
    changed = set()
    for path in (patched / "vllm").rglob("*"):
        stock = INSTALLED / path.relative_to(patched / "vllm")
        if path.is_symlink() or path.is_dir():
            continue
        if not stock.exists() or stock.read_bytes() != path.read_bytes():
            changed.add(str(path.relative_to(patched)))
    assert changed == expected
    for name in sorted(changed):
        assert compileall.compile_file(patched / name, quiet=2), name


def test_numbering_and_reasons() -> None:
    assert [int(patch.name[:4]) for patch in series()] == list(range(1, len(series()) + 1))
    names = {patch.name for patch in series()}
    assert {patch.name for patch in series("0.33.0")} <= names
    for patch in [*series(), *series("0.33.0")]:
        head, _, _ = patch.read_text().partition("\ndiff --git ")
        subject = re.search(r"^Subject: \[PATCH\] (\[\w+\] \S.*)$", head, re.MULTILINE)
        assert subject, patch.name
        assert len(head.partition("\n\n")[2].split()) > 15, f"{patch.name} gives no reason"


def run_on(patched: Path, *arguments: str) -> str:
    """Run pytest with the patched vLLM in place of the installed one; its output."""
    return run_python(
        *("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments),
        PYTHONPATH=str(patched),
        PATCHED_VLLM=str(patched),
        OMP_NUM_THREADS="1",
    ).stdout


EXACTNESS = [
    "tests/engine/patched_checks.py",
    *(
        f"tests/engine/test_exactness.py::{test}"
        for test in (
            "test_greedy[test_oracle-8-32]",
            "test_preemption[ngram_trie]",
            "test_chunked_prefill",
            "test_adaptive_budget[8]",
            "test_opted_out_request_gets_no_drafts",
            "test_same_request_id_again_after_an_abort",
        )
    ),
    "tests/engine/test_chains.py::test_attention_and_verification_are_vllms",
    *(
        f"tests/engine/beam/{test}"
        for test in (
            "test_against_transformers.py::test_repetition_penalty_and_min_tokens",
            "test_against_transformers.py::"
            "test_beside_greedy_requests[preemption, no prefix caching]",
            "test_beside_speculation.py::"
            "test_beams_get_no_drafts_and_others_keep_theirs[preemption]",
            "test_simulation.py::test_one_group",
            "test_simulation.py::test_pool_too_small_for_the_groups",
            "test_soak.py::test_random_groups_leave_nothing_behind[0]",
            "test_soak.py::test_random_groups_leave_nothing_behind[9]",
        )
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_tests_pass_on_a_patched_vllm(patched: Path) -> None:
    output = run_on(patched, *EXACTNESS)
    passed = re.search(r"^(\d+) passed", output.splitlines()[-1])
    assert passed, output[-500:]
    assert "skipped" not in output.splitlines()[-1]
    assert int(passed[1]) > 60
