from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_trie.native import (
    NativeBuildError,
    build_library,
    cache_folder,
    damaged_libraries,
    find_compiler,
    load_library,
)
from vllm_trie.native import build as build_module

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_TRIE_NATIVE", raising=False)
    build_module._log_once.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def test_compiles_loads_and_reuses(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library("answer", [source])
    assert library is not None
    assert library.answer() == 42
    path = build_library("answer", [source])
    before = path.stat().st_mtime_ns
    assert build_library("answer", [source]) == path
    assert path.stat().st_mtime_ns == before
    assert oct(cache_folder().stat().st_mode & 0o777) == "0o700"


def test_a_changed_source_header_or_flag_is_compiled_anew(source: Path, tmp_path: Path) -> None:
    header = tmp_path / "answer.h"
    header.write_text("// one\n")
    paths = [build_library("answer", [source], headers=[header])]
    header.write_text("// two\n")
    paths.append(build_library("answer", [source], headers=[header]))
    paths.append(build_library("answer", [source], flags=["-O1"], headers=[header]))
    source.write_text(SOURCE.replace("42", "43"))
    paths.append(build_library("answer", [source], headers=[header]))
    assert len(set(paths)) == 4
    library = load_library("answer", [source], headers=[header])
    assert library is not None
    assert library.answer() == 43


def test_no_compiler_is_one_log_line(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING, logger="vllm_trie"):
        assert load_library("answer", [source]) is None
        assert load_library("answer", [source]) is None
    # With the plugin loaded the line also passes through vLLM's logger: one record, seen twice.
    assert len({record.created for record in caplog.records}) == 1
    assert "no C++ compiler" in caplog.text
    monkeypatch.setenv("CXX", "nonesuch")
    with pytest.raises(NativeBuildError, match="CXX='nonesuch'"):
        build_library("answer", [source])


def test_a_compiler_behind_a_link(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ccache and clang do what the name says that they are called by."""
    real = find_compiler()[0]
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\ncase $0 in */g++) exec {real} "$@";; esac\nexit 3\n')
    wrapper.chmod(0o755)
    (tmp_path / "g++").symlink_to(wrapper)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() == (str(tmp_path / "g++"),)
    assert load_library("answer", [source]) is not None


def test_a_compiler_with_arguments(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env VARIABLE='a b' {find_compiler()[0]} -Wall")
    library = load_library("answer", [source])
    assert library is not None
    assert library.answer() == 42
    for wrong in ("g++ 'unbalanced", " "):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(NativeBuildError, match="is not a program"):
            find_compiler()


def test_compiler_errors_are_told(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("this is not C++")
    with pytest.raises(NativeBuildError, match=r"failed: .*answer.cpp"):
        build_library("answer", [source])
    assert load_library("answer", [source]) is None
    assert not list(cache_folder().glob("*.so"))


def test_native_code_can_be_switched_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TRIE_NATIVE", "0")
    assert load_library("answer", [source]) is None


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(255 - byte for byte in content[middle:])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "5 %": lambda content: content[: len(content) // 20],
    "50 %": lambda content: content[: len(content) // 2],
    "80 %": lambda content: content[: len(content) * 4 // 5],
    "empty": lambda content: b"",
    "no library": lambda content: b"damaged",
    "flipped": _flip,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(
    damage: str, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading any of the larger ones would end this process."""
    path = build_library("answer", [source])
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert damaged_libraries() == [path]
    library = load_library("answer", [source])
    assert library is not None
    assert library.answer() == 42
    assert "is compiled again" in caplog.text
    assert damaged_libraries() == []


@pytest.mark.parametrize("with_digest", [False, True])
def test_another_library_under_the_name_is_compiled_again(
    source: Path, tmp_path: Path, with_digest: bool
) -> None:
    other_source = tmp_path / "other.cpp"
    other_source.write_text('extern "C" int question() { return 6; }\n')
    other = build_library("other", [other_source])
    path = build_library("answer", [source])
    path.write_bytes(other.read_bytes())
    if with_digest:
        digest = other.with_suffix(".sha256").read_bytes()
        path.with_suffix(".sha256").write_bytes(digest)
    library = load_library("answer", [source], functions=["answer"])
    assert library is not None
    assert library.answer() == 42


def test_a_forged_library_is_compiled_again(source: Path, tmp_path: Path) -> None:
    """Its digest is right, and so only its functions give it away."""
    other_source = tmp_path / "other.cpp"
    other_source.write_text('extern "C" int question() { return 6; }\n')
    path = build_library("answer", [source])
    path.write_bytes(build_library("other", [other_source]).read_bytes())
    digest = build_module._content_digest(path, path.name)
    path.with_suffix(".sha256").write_text(digest)
    assert build_module.is_whole(path)
    library = load_library("answer", [source], functions=["answer"])
    assert library is not None
    assert library.answer() == 42


def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(blocked / "below"))
    with pytest.raises(NativeBuildError, match="set VLLM_TRIE_CACHE_DIR"):
        cache_folder()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VLLM_TRIE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(build_module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cache_folder() == tmp_path / f"vllm_trie-{os.getuid()}"


def _answer_in_child(source: str) -> int:
    library = load_library("answer", [Path(source)])
    return -1 if library is None else int(library.answer())


def test_concurrent_processes_compile_once(source: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a fork may inherit a lock that is held
    with context.Pool(4) as pool:
        assert pool.map(_answer_in_child, [str(source)] * 8, chunksize=1) == [42] * 8
    assert len(list(cache_folder().glob("*.so"))) == 1
    assert all(name.endswith((".so", ".lock", ".sha256")) for name in os.listdir(cache_folder())), (
        "temporary files are removed"
    )
