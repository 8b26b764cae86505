"""The CPU set-up's decisions: which Python, where uv looks, what is missing, when to run again."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_cpu(monkeypatch):
    spec = importlib.util.spec_from_file_location("setup_cpu", ROOT / "packaging" / "setup_cpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("PYTHON", raising=False)
    return module


def test_pip_settings_follow_pips_precedence(setup_cpu):
    listing = "\n".join(
        [
            ":env:.find-links='from-env'",
            "global.find-links='from-global'",
            "install.find-links='from-install'",
            "global.index-url='https://user:secret=x@index.example/simple'",
            "install.cert='install.pem'",
            "global.cert='global.pem'",
        ]
    )
    assert setup_cpu.pip_settings(listing) == {
        "find-links": "from-env",
        "index-url": "https://user:secret=x@index.example/simple",
        "cert": "install.pem",
    }


def test_uv_looks_where_pip_looks(setup_cpu):
    settings = {
        "find-links": "wheels-a\nwheels-b",
        "index-url": "https://index.example/simple",
        "extra-index-url": "https://a.example/s https://b.example/s",
    }
    env = setup_cpu.uv_environment(settings, base={"PYTHONPATH": "x", "VIRTUAL_ENV": "y"})
    assert env["UV_FIND_LINKS"] == "wheels-a,wheels-b"
    assert env["UV_DEFAULT_INDEX"] == "https://index.example/simple"
    assert not {"UV_INDEX", "PYTHONPATH", "VIRTUAL_ENV"} & env.keys()
    env = setup_cpu.uv_environment(settings, with_extra_indexes=True, base={})
    assert env["UV_INDEX"] == "https://a.example/s https://b.example/s"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"


@pytest.mark.parametrize(
    ("versions", "chosen", "expected"),
    [
        # The lock's is preferred, a newer one will do, a chosen one is the only candidate.
        ({"this": (3, 13), "python3.11": (3, 11)}, None, ("python3.11", (3, 11))),
        ({"this": (3, 10), "python3.12": (3, 12)}, None, ("python3.12", (3, 12))),
        ({"this": (3, 10)}, None, r"Python 3\.11 is needed.*\(3\.10\)"),
        ({"this": (3, 15)}, None, r"Python 3\.11 is needed.*\(3\.15\)"),
        ({}, None, r"Python 3\.11 is needed.*none that runs"),
        ({"this": (3, 11), "mine": (3, 9)}, "mine", "mine"),
    ],
)
def test_the_interpreter(setup_cpu, monkeypatch, versions, chosen, expected):
    by_name = {sys.executable if name == "this" else name: v for name, v in versions.items()}
    monkeypatch.setattr(setup_cpu, "interpreter_version", by_name.get)
    if chosen is not None:
        monkeypatch.setenv("PYTHON", chosen)
    if isinstance(expected, tuple):
        assert setup_cpu.find_python() == expected
        assert setup_cpu.uses_lock(expected[1]) == (expected[1] == (3, 11))
    else:
        with pytest.raises(setup_cpu.SetupError, match=f"(?s){expected}"):
            setup_cpu.find_python()


def test_only_what_differs_from_the_lock_is_installed(setup_cpu, monkeypatch, tmp_path):
    lock = tmp_path / "cpu.txt"
    lock.write_text("# header\na-b==1.0\n    # via c\ntorch==2.0+cpu\nmissing==3\nold==2\n")
    monkeypatch.setattr(setup_cpu, "LOCK", lock)
    installed = {"a-b": "1.0", "torch": "2.0+cpu", "old": "1", "beside": "9"}
    monkeypatch.setattr(setup_cpu, "installed_versions", lambda: installed)
    assert setup_cpu.missing_from_lock() == ["missing==3", "old==2"]


def test_set_up_runs_once_and_again_when_an_input_changed_or_it_failed(
    setup_cpu, monkeypatch, tmp_path
):
    lock, stamp = tmp_path / "cpu.txt", tmp_path / "stamp.json"
    lock.write_text("a==1\n")
    steps: list[str] = []
    monkeypatch.setattr(setup_cpu, "LOCK", lock)
    monkeypatch.setattr(setup_cpu, "STAMP", stamp)
    monkeypatch.setattr(setup_cpu, "VENV_PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup_cpu, "venv_is_usable", lambda: True)
    monkeypatch.setattr(setup_cpu, "install_uv", lambda env: steps.append("uv"))
    monkeypatch.setattr(setup_cpu, "install_packages", lambda version: steps.append("packages"))
    monkeypatch.setattr(setup_cpu, "check", lambda: steps.append("check"))
    setup_cpu.set_up()
    setup_cpu.set_up()
    assert steps == ["uv", "packages", "check"]
    lock.write_text("a==2\n")
    setup_cpu.set_up()
    assert steps == ["uv", "packages", "check"] * 2

    def fail(version: tuple[int, int]) -> None:
        raise setup_cpu.SetupError("no network")

    lock.write_text("a==3\n")
    monkeypatch.setattr(setup_cpu, "install_packages", fail)
    with pytest.raises(setup_cpu.SetupError):
        setup_cpu.set_up()
    assert not stamp.exists()
