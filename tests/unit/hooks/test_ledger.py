"""The table of patches notices what has moved; patches go in once and come out whole."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import vllm_trie
from vllm_trie.hooks import ledger
from vllm_trie.hooks.ledger import Entry, record
from vllm_trie.hooks.ledger.installation import Installation
from vllm_trie.hooks.ledger.table import check_entry

PACKAGE = Path(vllm_trie.__file__).parent
HERE = "a_module_of_vllm:Subject"


@pytest.fixture(autouse=True)
def subject(monkeypatch):
    """A class to patch, in a module to import."""

    class Base:
        def inherited(self) -> str:
            return "inherited"

    class Subject(Base):
        def method(self, first: int, second: int = 0, *, third: int = 0) -> Any:
            return first

        @staticmethod
        def static(value: str) -> str:
            return value

    module = types.ModuleType("a_module_of_vllm")
    module.Subject = Subject
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Subject


# -- the check -------------------------------------------------------------------------------------


def check_one(target: str, parameters: tuple[str, ...] | None = None) -> ledger.Finding:
    return check_entry(Entry(target, "called", "why", parameters))


@pytest.mark.parametrize(
    "parameters",
    [None, (), ("first",), ("first", "second"), ("first", "third"), ("second", "third")],
)
def test_what_fits(parameters):
    finding = check_one(f"{HERE}.method", parameters)
    assert (finding.status, finding.detail, finding.fits) == ("ok", "", True)


@pytest.mark.parametrize("parameters", [("renamed",), ("second", "first"), ("first", "gone")])
def test_changed_signatures(parameters):
    finding = check_one(f"{HERE}.method", parameters)
    assert (finding.status, finding.fits) == ("changed", False)
    assert "first" in finding.detail
    assert parameters[0] in finding.detail


@pytest.mark.parametrize(
    "target", ["no_such_package.module:x", "json:no_such_name", "json:JSONDecoder.no_such_name"]
)
def test_missing_symbols(target):
    finding = check_one(target)
    assert (finding.status, finding.fits) == ("missing", False)
    assert "no_such" in finding.detail
    assert finding.target == target


# -- the table -------------------------------------------------------------------------------------


def test_every_entry_says_why_and_until_when():
    for patch in ledger.entries():
        assert patch.why
        assert patch.until, patch.target
        assert patch.target.startswith("vllm."), patch.target
        assert (patch.wrapper is not None) == (patch.kind in ("wrapped", "subclassed"))
    keys = [(patch.target, patch.feature, patch.scope, patch.why) for patch in ledger.entries()]
    assert len(set(keys)) == len(keys)


def test_nothing_else_assigns_to_what_vllm_defines():
    """Assignments to attributes of imported names, which classes and modules of vLLM are."""
    assignments = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                targets = [ast.Attribute(node.args[0], "any", ast.Store())]
            for target in targets:
                while isinstance(target, ast.Attribute | ast.Subscript):
                    target = target.value
                    if isinstance(target, ast.Name) and target.id in imported:
                        assignments.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert assignments == []


# -- patches in place ------------------------------------------------------------------------------


def loud(original: Any) -> Any:
    return lambda *arguments: f"{original(*arguments)}!"


def a_patch(name: str, **changes: Any) -> Entry:
    patch = Entry(f"{HERE}.{name}", "wrapped", "why", wrapper=loud)
    return dataclasses.replace(patch, **changes)


def test_patches_come_out_as_they_went_in(subject):
    installation, before = Installation(), dict(vars(subject))
    for name in ("method", "static", "inherited"):
        installation.apply(a_patch(name))
    assert (subject().method(3), subject.static("x"), subject().static("y")) == ("3!", "x!", "y!")
    assert subject().inherited() == "inherited!"
    installation.undo()
    assert dict(vars(subject)) == before
    assert installation.patches == ()


def test_a_patch_goes_in_once(subject):
    installation = Installation()
    installation.apply(a_patch("method"))
    with pytest.raises(RuntimeError, match=r"Subject\.method is patched already"):
        installation.apply(a_patch("method"))
    assert subject().method(3) == "3!"


def test_two_features_wrap_one_symbol(subject):
    installation, before = Installation(), dict(vars(subject))
    installation.apply(a_patch("method"))
    installation.apply(a_patch("method", feature="beam"))
    assert subject().method(3) == "3!!"
    installation.undo(keep=1)
    assert subject().method(3) == "3!"
    installation.undo()
    assert dict(vars(subject)) == before


def test_a_wrapper_runs_around_an_override_that_does_not_call_what_it_wraps(monkeypatch):
    monkeypatch.setattr(record, "ENTRIES", [])
    symbols = record.Symbols("tests.")

    class Override:
        @symbols.within_wrappers
        def method(self, first: int) -> str:
            return f"own {first}"

    assert Override().method(3) == "own 3"
    for mark in "!?":

        @symbols.wraps("method", "why")
        def wrapper(original: Any, self: Any, first: int, mark: str = mark) -> str:
            return f"{original(self, first + 1)}{mark}"

    assert Override().method(3) == "own 5!?"


def test_somebody_elses_patch_on_top_is_not_lost(subject):
    installation = Installation()
    installation.apply(a_patch("method"))
    subject.method = theirs = lambda self: "theirs"
    with pytest.raises(RuntimeError, match="undo that first"):
        installation.undo()
    assert subject.method is theirs


@pytest.fixture
def one_feature(monkeypatch):
    """An installation of a table with a patch for each scope."""
    patches = (
        a_patch("method"),
        a_patch("static", scope="native_search"),
        a_patch("inherited", scope="tree_runner"),
        a_patch("gone", wrapper=None),
    )
    ledger.entries()  # before the table is replaced, as modules record theirs on import
    monkeypatch.setattr(record, "ENTRIES", patches)
    return Installation()


def names_of(installation: Installation) -> list[str]:
    return [patch.target.rpartition(".")[2] for patch in installation.patches]


def test_scopes(one_feature, subject):
    for feature in ("speculation", "speculation", "beam"):
        one_feature.install(feature, native_search=False)
    assert names_of(one_feature) == ["method"]
    with contextlib.suppress(KeyError), one_feature.installed("tree_runner"):
        assert names_of(one_feature) == ["method", "inherited"]
        assert subject().inherited() == "inherited!"
        raise KeyError
    assert names_of(one_feature) == ["method"]
    assert "inherited" not in vars(subject)
    one_feature.install("speculation")
    assert names_of(one_feature) == ["method", "static"]


def test_a_feature_is_installed_whole_or_not_at_all(one_feature, subject, monkeypatch):
    broken = dataclasses.replace(record.ENTRIES[1], target=f"{HERE}.gone")
    monkeypatch.setattr(record, "ENTRIES", (record.ENTRIES[0], broken))
    before = dict(vars(subject))
    with pytest.raises(AttributeError):
        one_feature.install("speculation")
    assert dict(vars(subject)) == before
    assert one_feature.patches == ()
