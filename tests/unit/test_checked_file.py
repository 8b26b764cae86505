"""What all data files have in common: damage, other files and other versions are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import numbers_file
from vllm_trie.files.checked_file import PREFIX, CheckedFormat


class Kind(NamedTuple):
    """How files of a kind are written and opened."""

    format: CheckedFormat[Any]
    write: Callable[[Path], object]
    open: Callable[[Path], object]


@pytest.fixture
def kind(tmp_path):
    """A kind of file, of which there is one; extras have tests with kinds of their own."""
    return made(
        Kind(numbers_file.FORMAT, lambda path: numbers_file.write(path, 40), numbers_file.read),
        tmp_path,
    )


def made(kind: Kind, folder: Path) -> Kind:
    kind.write(folder / "file")
    kind.open(folder / "file")
    return kind


def refusal(kind: Kind, path: Path, content: bytes | None = None) -> str:
    """Return what is said to a file, once it has this content."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(kind.format.error) as refused:
        kind.open(path)
    assert f"{path}: " in str(refused.value)
    assert str(refused.value).endswith(kind.format.remedy)
    return str(refused.value)


def test_every_truncation_is_noticed(kind, tmp_path):
    path = tmp_path / "file"
    content = path.read_bytes()
    for size in [*range(0, 200), *range(200, len(content), 97), len(content) - 1]:
        said = refusal(kind, path, content[:size])
        assert any(word in said for word in ("truncated", "it is not a", "damaged")), said
    assert "longer than it should be" in refusal(kind, path, content + b"\0")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_changed_byte_is_noticed(kind, tmp_path, data):
    content = bytearray((tmp_path / "file").read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    refusal(kind, tmp_path / "changed", bytes(content))


def test_missing_foreign_and_newer_files(kind, tmp_path):
    path, version = tmp_path / "file", kind.format.version
    assert "No such file" in refusal(kind, tmp_path / "nothing")
    content = path.read_bytes()
    newer = kind.format.magic + (version + 1).to_bytes(4, "little") + content[12:]
    said = refusal(kind, path, newer)
    assert f"version {version + 1}, this program reads {version}" in said
    for other in (b"", b"PK\x03\x04 a zip file", b"\0" * 1000, b"VTRIEXXX" + content[8:]):
        assert "it is not a" in refusal(kind, path, other)


def test_a_file_that_may_not_be_looked_for(kind, tmp_path, monkeypatch):
    def fail(self: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", fail)
    with pytest.raises(kind.format.error, match="Permission denied"):
        kind.format.read_header(tmp_path / "file")


def test_a_large_header_is_not_read(kind, tmp_path):
    with (tmp_path / "file").open("r+b") as opened:
        opened.write(PREFIX.pack(kind.format.magic, kind.format.version, 1 << 31, bytes(32)))
        opened.truncate(1 << 33)  # sparse
    assert "header" in refusal(kind, tmp_path / "file")
