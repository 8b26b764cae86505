from __future__ import annotations

from ctypes import ArgumentError
from pathlib import Path

import pytest

from vllm_trie.attention.native import load_kernels
from vllm_trie.native import NativeBuildError, NativeLibrary, find_compiler
from vllm_trie.native import build as build_module
from vllm_trie.ngrams import native as ngrams

SOURCE = """
#include <cstdint>
extern "C" int64_t twice(int64_t value) { return 2 * value; }
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeLibrary:
    monkeypatch.setenv("VLLM_TRIE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_TRIE_NATIVE", raising=False)
    build_module._log_once.cache_clear()
    source = tmp_path / "twice.cpp"
    source.write_text(SOURCE)
    return NativeLibrary("twice", "doubling", [source])


def test_functions_have_their_types(library: NativeLibrary) -> None:
    assert library.is_available()
    assert library.require().twice(1 << 40) == 1 << 41  # more than ctypes' default, an int
    with pytest.raises(ArgumentError):
        library.require().twice("1")


def test_nothing_is_compiled_before_it_is_used(library: NativeLibrary, tmp_path: Path) -> None:
    assert not (tmp_path / "cache").exists()
    library.require()
    assert list((tmp_path / "cache").glob("twice-*.so"))


def test_a_missing_library_is_told_by_its_subject(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TRIE_NATIVE", "0")
    assert not library.is_available()
    with pytest.raises(RuntimeError, match="the compiled doubling is not available; see the log"):
        library.require()


def test_a_library_without_one_of_its_functions_is_not_used(
    library: NativeLibrary, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "thrice.cpp"
    source.write_text('#if 0\nextern "C" int thrice() { return 3; }\n#endif\n')
    other = NativeLibrary("thrice", "tripling", [source])
    assert not other.is_available()
    assert "thrice" in caplog.text


def test_the_package_compiles_where_there_is_a_compiler() -> None:
    """Without its own code it would go on, slowly, and the code's tests would be skipped."""
    try:
        find_compiler()
    except NativeBuildError:
        pytest.skip("no C++ compiler here")
    assert ngrams.is_available()
    assert load_kernels() is not None
