"""An extra is a folder that can be deleted, with its tests: what is left works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deletion import ROOT
from tests.processes import run_program
from vllm_trie.extras import EXTRAS


def test_every_extra_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / "vllm_trie/extras").glob("*/__init__.py")}
    assert folders == EXTRAS.keys()


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    """What works without extras; the program fails where the core's unit tests do."""
    return run_program("tests.deletion", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def test_modules_are_imported_without_any_one_extra_and_without_all(without):
    assert without["imports"] == {name: [] for name in EXTRAS}
    assert without["imports without all"] == []


def test_an_engine_without_extras_drafts_verifies_and_searches(without):
    engine = without["engine"]
    assert engine["extras"] == engine["differences"] == []
    assert engine["accepted"] > 20
    assert engine["hypotheses"] == 29


def test_the_cores_unit_tests_pass_without_extras(without):
    assert without["tests"] == 0
