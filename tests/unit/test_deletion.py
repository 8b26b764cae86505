"""An extra is a folder that can be deleted, with its tests: what is left works."""

from __future__ import annotations

import pytest

from tests.deletion import ROOT
from tests.processes import run_program, run_python
from vllm_trie.extras import EXTRAS

CORE_TESTS = ("beam", "drafters", "hooks")
"""Of the folders that ask extras; those below cannot know them, see test_structure.py."""


def test_every_extra_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / "vllm_trie/extras").glob("*/__init__.py")}
    assert folders == EXTRAS.keys()


def test_modules_are_imported_without_any_one_extra_and_without_all():
    done = run_python("-m", "tests.deletion", "imports", *EXTRAS, ",".join(EXTRAS))
    assert done.stdout == ""


@pytest.mark.engine
def test_an_engine_without_extras_drafts_verifies_and_searches():
    run = "run", *EXTRAS, "--", "tests.engine.without_extras"
    result = run_program("tests.deletion", *run, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert result["extras"] == result["differences"] == []
    assert result["accepted"] > 20
    assert result["hypotheses"] == 29


@pytest.mark.engine
def test_the_cores_unit_tests_pass_without_extras():
    tests = [f"tests/unit/{name}" for name in CORE_TESTS]
    run_python("-m", "tests.deletion", "run", *EXTRAS, "--", "pytest", "-q", "-n0", *tests)
