"""Compiled cores: which one is loaded, how its functions are typed, and what is wrong with one."""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import ArgumentError
from pathlib import Path

import pytest

from tests.compiled import compile_library
from vllm_trie.native import INSTRUCTION_SETS, CoreError, NativeLibrary, cpu_flags, usable_sets
from vllm_trie.native import library as library_module

SOURCE = """
#include <cstdint>
extern "C" int64_t twice(int64_t value) { return 2 * value; }
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "twice.cpp"
    path.write_text(SOURCE)
    return path


def test_functions_have_their_types(source, monkeypatch):
    compile_library(source, monkeypatch)
    functions = NativeLibrary("twice", [source]).functions
    assert functions.twice(1 << 40) == 1 << 41  # more than ctypes' default, an int
    with pytest.raises(ArgumentError):
        functions.twice("1")


def _lacks_a_function(library: Path, source: Path) -> None:
    source.write_text(SOURCE + 'extern "C" int64_t thrice(int64_t value) { return 3 * value; }')


def _of_another_commit(library: Path, source: Path) -> None:
    (source.parent / ".git").mkdir()
    built = library.stat().st_mtime
    os.utime(source, (built + 1, built + 1))


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "missing": lambda library, source: library.unlink(),
    "empty": lambda library, source: library.write_bytes(b""),
    "no library": lambda library, source: library.write_text("damaged"),
    "lacks a function": _lacks_a_function,
    "older than its source": _of_another_commit,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_core_that_cannot_be_used_is_named_with_the_way_out(damage, source, monkeypatch):
    library = compile_library(source, monkeypatch)
    DAMAGES[damage](library, source)
    message = (
        f"core {library.name} of vllm-trie cannot be used: .*Install the wheel, or .*make venv"
    )
    with pytest.raises(CoreError, match=message):
        NativeLibrary("twice", [source]).load()


def test_the_best_set_that_the_processor_has(monkeypatch):
    def best(flags: set[str]) -> str:
        monkeypatch.setattr(library_module, "cpu_flags", lambda: frozenset(flags))
        return usable_sets()[0]

    every = set().union(*INSTRUCTION_SETS.values())
    assert best(every | {"sse2"}) == "x86-64-v4-bf16"
    assert best(every - {"avx512_bf16"}) == "x86-64-v4"
    assert best(every - {"avx512vl"}) == "x86-64-v3"
    assert best(every - {"avx512vl", "avx2"}) == best(set()) == "baseline"
    assert usable_sets() == ["baseline"]  # as on other processors, which report no flags


def test_a_build_for_some_sets_will_do(source, monkeypatch):
    library = compile_library(source, monkeypatch)
    sets = ["better", "baseline"]
    monkeypatch.setattr(library_module, "usable_sets", lambda: sets)
    assert NativeLibrary("twice", [source]).functions._name == str(library)


def test_flags_are_whole_words_of_the_first_processor(tmp_path):
    listing = tmp_path / "cpuinfo"
    listing.write_text("model name : avx512f\nflags\t\t: fma avx2 avx2x\nflags\t\t: sse2\n")
    assert {"fma", "avx2"} <= cpu_flags(listing)
    assert "sse2" not in cpu_flags(listing)
    assert cpu_flags(tmp_path / "absent") == frozenset()
