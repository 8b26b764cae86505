"""The choice between a wheel's compiled cores."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vllm_trie.native import build_library, cache_folder, load_library, prebuilt
from vllm_trie.native.prebuilt import INSTRUCTION_SETS, cpu_flags, find_prebuilt


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's own folder of libraries, and a cache, both empty."""
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_TRIE_NATIVE", raising=False)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    prebuilt.FOLDER.mkdir()
    return prebuilt.FOLDER


def test_the_best_that_the_processor_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best, second, last = INSTRUCTION_SETS
    for name in (best, second, last):
        (folder / f"core-{name}.so").write_text("")

    def chosen(flags: set[str], core: str = "core") -> str | None:
        monkeypatch.setattr(prebuilt, "cpu_flags", lambda: frozenset(flags))
        library = find_prebuilt(core)
        return library and library.name

    everything = INSTRUCTION_SETS[best]
    assert chosen(everything | {"amx_bf16"}) == f"core-{best}.so"
    assert chosen(everything - {"avx512_bf16"}) == f"core-{second}.so"
    assert chosen(everything - {"avx512bw"}) == f"core-{last}.so"
    assert chosen(everything - {"fma"}) is None
    assert chosen(set()) is None
    assert chosen(everything, "other") is None
    (folder / f"core-{best}.so").unlink()
    assert chosen(everything) == f"core-{second}.so"


def test_flags_of_the_first_processor(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nflags\t\t: fma avx2\n\nprocessor\t: 1\nflags\t\t: sse2\n")
    assert {"fma", "avx2"} <= cpu_flags(listing)
    assert "sse2" not in cpu_flags(listing)
    assert cpu_flags(tmp_path / "absent") == frozenset()


def test_a_prebuilt_library_goes_before_the_compiler(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (last,) = list(INSTRUCTION_SETS)[-1:]
    monkeypatch.setattr(prebuilt, "cpu_flags", lambda: frozenset(INSTRUCTION_SETS[last]))
    source = tmp_path / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    build_library("answer", [source]).rename(folder / f"answer-{last}.so")
    caplog.set_level(logging.INFO, logger="vllm_trie")
    caplog.clear()
    loaded = load_library("answer", [source])
    assert loaded is not None
    assert loaded.answer() == 42
    assert not list(cache_folder().glob("*.so"))
    assert "compiling" not in caplog.text
    damaged = folder / f"damaged-{last}.so"
    damaged.write_text("damaged")
    assert load_library("damaged", [source]) is not None
    assert f"cannot load {damaged}" in caplog.text
    assert "compiling damaged" in caplog.text
