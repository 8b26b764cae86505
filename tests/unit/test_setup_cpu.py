"""The CPU set-up's decisions: which Python, where uv looks, what is missing, when to run again."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_cpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_cpu", ROOT / "packaging" / "setup_cpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("PYTHON", raising=False)
    return module


def test_pip_settings_follow_pips_precedence(setup_cpu: ModuleType) -> None:
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


def test_uv_looks_where_pip_looks(setup_cpu: ModuleType) -> None:
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


def test_uvs_own_variables_win(setup_cpu: ModuleType) -> None:
    env = setup_cpu.uv_environment({"find-links": "pips"}, base={"UV_FIND_LINKS": "mine"})
    assert env["UV_FIND_LINKS"] == "mine"
    assert "UV_FIND_LINKS" not in setup_cpu.uv_environment({}, base={})


def fake_versions(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, versions: dict[str, tuple[int, int]]
) -> None:
    monkeypatch.setattr(module, "interpreter_version", versions.get)


def test_python_of_the_lock_is_preferred(
    setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_versions(monkeypatch, setup_cpu, {sys.executable: (3, 13), "python3.11": (3, 11)})
    assert setup_cpu.find_python() == ("python3.11", (3, 11))


def test_a_newer_python_will_do(setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, setup_cpu, {sys.executable: (3, 10), "python3.12": (3, 12)})
    assert setup_cpu.find_python() == ("python3.12", (3, 12))
    assert not setup_cpu.uses_lock((3, 12))


@pytest.mark.parametrize("version", [(3, 10), (3, 15), None])
def test_unusable_pythons_are_named(
    setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int] | None
) -> None:
    fake_versions(monkeypatch, setup_cpu, {sys.executable: version} if version else {})
    with pytest.raises(setup_cpu.SetupError, match=r"Python 3\.11 is needed") as caught:
        setup_cpu.find_python()
    expected = f"({version[0]}.{version[1]})" if version else "none that runs"
    assert expected in str(caught.value)


def test_a_chosen_python_is_the_only_candidate(
    setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", "mine")
    fake_versions(monkeypatch, setup_cpu, {sys.executable: (3, 11), "mine": (3, 9)})
    with pytest.raises(setup_cpu.SetupError, match="mine"):
        setup_cpu.find_python()


def test_interpreter_version_of_what_does_not_run(setup_cpu: ModuleType) -> None:
    assert setup_cpu.interpreter_version(sys.executable) == sys.version_info[:2]
    assert setup_cpu.interpreter_version("no-such-python") is None
    assert setup_cpu.interpreter_version(shutil.which("false") or "false") is None


def test_only_what_differs_from_the_lock_is_installed(
    setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "cpu.txt"
    lock.write_text("# header\na-b==1.0\n    # via c\ntorch==2.0+cpu\nmissing==3\nold==2\n")
    monkeypatch.setattr(setup_cpu, "LOCK", lock)
    installed = {"a-b": "1.0", "torch": "2.0+cpu", "old": "1", "beside": "9"}
    monkeypatch.setattr(setup_cpu, "installed_versions", lambda: installed)
    assert setup_cpu.missing_from_lock() == ["missing==3", "old==2"]


def test_set_up_runs_once_and_again_when_an_input_changed(
    setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "cpu.txt"
    lock.write_text("a==1\n")
    steps: list[str] = []
    monkeypatch.setattr(setup_cpu, "LOCK", lock)
    monkeypatch.setattr(setup_cpu, "STAMP", tmp_path / "stamp.json")
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


def test_a_failed_set_up_leaves_no_stamp(
    setup_cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stamp = tmp_path / "stamp.json"
    stamp.write_text(json.dumps({"fingerprint": "of another state"}))
    monkeypatch.setattr(setup_cpu, "STAMP", stamp)
    monkeypatch.setattr(setup_cpu, "VENV_PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup_cpu, "venv_is_usable", lambda: True)
    monkeypatch.setattr(setup_cpu, "install_uv", lambda env: None)

    def fail(version: tuple[int, int]) -> None:
        raise setup_cpu.SetupError("no network")

    monkeypatch.setattr(setup_cpu, "install_packages", fail)
    with pytest.raises(setup_cpu.SetupError):
        setup_cpu.set_up()
    assert not stamp.exists()
